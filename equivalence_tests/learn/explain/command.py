"""``sidebyside explain``: what an argument does, or the table of all arguments."""

import json
from typing import Annotated

import typer

from equivalence_tests.learn import terminal
from equivalence_tests.learn.explain.registry import find_explanations
from equivalence_tests.learn.explain.rendering import as_data, in_full, listing, short_data

__all__ = ["explain"]


def explain(
    argument: Annotated[
        str | None,
        typer.Argument(
            metavar="ARGUMENT",
            help="The argument to explain, such as is_causal, key_padding_mask or norm_first.",
            show_default=False,
        ),
    ] = None,
    owner: Annotated[
        str | None,
        typer.Option(
            "--of", "--owner", metavar="CLASS", help="Explain it only for this class or function.", show_default=False
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print everything as JSON, one entry per explanation.")
    ] = False,
) -> None:
    """Explain an argument of torch.nn's attention, with live code.

    You get a description, a drawing where one helps, the lines of scratch that implement it, and an example on
    torch.nn that is run on the spot. Where classes treat the argument differently, each way is shown. Without ARGUMENT,
    all arguments are listed.
    """
    try:
        found = find_explanations(argument, owner)
    except LookupError as error:
        raise typer.BadParameter(str(error)) from None
    if as_json:
        typer.echo(json.dumps([(short_data if argument is None else as_data)(x) for x in found], indent=2))
        return
    page = terminal.console()
    if argument is None:
        page.print(listing(owner))
        return
    for number, explanation in enumerate(found, start=1):
        if len(found) > 1:
            page.rule(f"{argument}, way {number} of {len(found)}; --of CLASS shows one alone", style="dim")
        page.print(in_full(explanation))
