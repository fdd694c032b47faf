"""``sidebyside explain``: what an argument does, or the table of all arguments."""

import json
from typing import Annotated

import typer

from equivalence_tests import pages
from equivalence_tests.explain.registry import find_explanations
from equivalence_tests.explain.rendering import as_data, in_full, listing, short_data

__all__ = ["explain"]


def explain(
    argument: Annotated[
        str | None,
        typer.Argument(metavar="ARGUMENT", help="is_causal, key_padding_mask, norm_first, ...", show_default=False),
    ] = None,
    owner: Annotated[
        str | None,
        typer.Option(
            "--of", "--owner", metavar="CLASS", help="As this class or function takes it.", show_default=False
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a list with all that is known as JSON, one entry for each way.")
    ] = False,
) -> None:
    """Explain an argument of torch.nn's attention, with live code.

    It is told in words, drawn where that helps, and shown by the lines of scratch that do it and by an example on
    torch.nn that is run now. Where classes treat it in different ways, all are shown one after the other. Without an ARGUMENT all of them are
    listed.
    """
    try:
        found = find_explanations(argument, owner)
    except LookupError as error:
        raise typer.BadParameter(str(error)) from None
    if as_json:
        typer.echo(json.dumps([(short_data if argument is None else as_data)(x) for x in found], indent=2))
        return
    page = pages.console()
    if argument is None:
        page.print(listing(owner))
        return
    for number, explanation in enumerate(found, start=1):
        if len(found) > 1:
            page.rule(f"{argument}, {number} of the {len(found)} ways it is treated; --of CLASS shows one", style="dim")
        page.print(in_full(explanation))
