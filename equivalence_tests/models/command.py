"""``sidebyside models``: is an attention function right inside the models of transformers?"""

import inspect
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from equivalence_tests.checker.reach.errors import CannotCheckError
from equivalence_tests.checker.reach.loading import load
from equivalence_tests.compare.command import about_this_machine
from equivalence_tests.kernels.command import check_files, write
from equivalence_tests.kernels.faults import Request
from equivalence_tests.kernels.running import counted
from equivalence_tests.models.from_transformers import Transformers, registered_by
from equivalence_tests.models.library import Architecture, Registration
from equivalence_tests.models.precision import in_float64
from equivalence_tests.models.running import best_registration, judged
from equivalence_tests.progress import progress
from scratch import validation
from scratch.task.command_line import one_line_errors

__all__ = ["models"]

NONE = "none"
GIVEN = ("module", "query", "key", "value", "attention_mask")


def models(
    target: Annotated[
        str,
        typer.Argument(
            metavar="TARGET", help="Your attention function: file.py:name or module:name.", show_default=False
        ),
    ],
    mask: Annotated[
        str | None,
        typer.Option(
            help="The mask function to register with it: eager, sdpa, flex_attention, none, or file.py:name. By "
            "default the one of the same name, if your file registers the function; else the one that it understands.",
            show_default=False,
        ),
    ] = None,
    architecture: Annotated[list[str] | None, typer.Option(help="Only these: llama, bert, ... Repeatable.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer models and situations: under a minute.")] = False,
    seed: Annotated[int, typer.Option(help="Seed of the inputs: the same seed gives the same table.")] = 0,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write everything as JSON; - prints it.")] = None,
    junit_file: Annotated[
        Path | None, typer.Option("--junit", help="Write every cell as JUnit XML; - prints it.")
    ] = None,
    github: Annotated[bool, typer.Option("--github", help="Print the faults as GitHub annotations.")] = False,
) -> None:
    """Find where an attention function for transformers goes wrong: in which models, situations and layers.

    Tiny models of transformers run with the function in place of their own attention: without masks, padded,
    packed, longer than their window, with caches, generating and training. Needs the extra wild.

    Exit status: 0 if nothing is wrong, 1 if something is, 2 if it could not be run.
    """
    with one_line_errors():
        check_files(json_file, junit_file)
        library = Transformers()
        function = _attention_function(target)
        with progress("building", None) as advance, in_float64():
            listed = library.architectures(tuple(architecture or ()), quick, advance)
        registration = _registration(library, listed, function, target, mask)
    request = Request("cpu", ("float64",), (), quick, seed)
    with progress("judging", None) as advance:
        report = judged(library, listed, registration, request, lambda *what: advance(counted(*what)))
    write(replace(report, machine=about_this_machine(torch.device("cpu"))), json_file, junit_file, github)
    raise typer.Exit(report.exit_status)


def _loaded(target: str) -> Any:
    try:
        function = load(target)
    except CannotCheckError as error:
        raise validation.ArgumentValueError(str(error)) from error
    if not callable(function):
        raise validation.ArgumentTypeError(f"{target} must be a function, got a {type(function).__name__}")
    return function


def _attention_function(target: str) -> Any:
    """Load the target, which must take what models hand over."""
    function = _loaded(target)
    try:
        inspect.signature(function).bind(*GIVEN)
    except (TypeError, ValueError) as error:
        wanted = f"{target} must be a function of ({', '.join(GIVEN)}, **kwargs)"
        raise validation.ArgumentValueError(f"{wanted}: {error}") from error
    return function


def _registration(
    library: Transformers, listed: list[Architecture], function: Any, target: str, mask: str | None
) -> Registration:
    """Find the mask function: the one that is asked for, the one that is registered, or the one that serves best."""
    found = library.registered(function)
    if mask is None and found is not None:
        return replace(found, lines=registered_by(target))
    if mask is None:
        return best_registration(library, listed, function, lambda f, name: _with(library, f, target, name))
    return _with(library, function, target, mask)


def _with(library: Transformers, function: Any, target: str, mask: str) -> Registration:
    """Register the function with a mask function under a name of ours."""
    if mask == NONE:
        masked = None
    elif ":" in mask:
        masked = _loaded(mask)
    else:
        validation.check_choice("--mask", mask, (*library.masks, NONE))
        masked = library.masks[mask]
    return library.registration(function, masked, target, mask)
