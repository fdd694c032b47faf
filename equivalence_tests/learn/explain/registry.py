"""All explanations, and how to find those that were asked for."""

import difflib
from collections.abc import Iterable

from equivalence_tests.learn.explain import (
    attention,
    decoder_only,
    flex,
    grouped,
    layers,
    norms,
    rotary,
    sdpa,
    stacks,
    varlen,
)
from equivalence_tests.learn.explain.entry import OWNERS, Explanation, calls_of

__all__ = ["EXPLANATIONS", "arguments_of", "find_explanations"]

EXPLANATIONS: tuple[Explanation, ...] = (
    *attention.EXPLANATIONS,
    *sdpa.EXPLANATIONS,
    *flex.EXPLANATIONS,
    *varlen.EXPLANATIONS,
    *layers.EXPLANATIONS,
    *stacks.EXPLANATIONS,
    *norms.EXPLANATIONS,
    *rotary.EXPLANATIONS,
    *grouped.EXPLANATIONS,
    *decoder_only.EXPLANATIONS,
)


def find_explanations(argument: str | None = None, owner: str | None = None) -> list[Explanation]:
    """Find the explanations of an argument.

    Args:
        argument: Its name; every argument if not given.
        owner: The class or function that takes it; each that does if not given.

    Returns:
        One for each way in which it is treated.

    Raises:
        LookupError: If there is no such class or argument, with the names that come near.

    >>> [explanation.owners for explanation in find_explanations("mask_check")]
    [('TransformerEncoder',)]
    """
    if owner is not None and owner not in OWNERS:
        raise LookupError(
            f"there is no class or function {owner!r}: {_hint(owner, OWNERS)}they are {', '.join(OWNERS)}."
        )
    of_owner = [explanation for explanation in EXPLANATIONS if owner is None or owner in explanation.owners]
    found = [explanation for explanation in of_owner if argument in (None, explanation.argument)]
    if not found:
        raise LookupError(_why_not(str(argument), owner, of_owner))
    return found


def _why_not(argument: str, owner: str | None, of_owner: list[Explanation]) -> str:
    takers = [taker for explanation in EXPLANATIONS if explanation.argument == argument for taker in explanation.owners]
    if takers:
        return f"{owner} has no argument {argument!r}: {', '.join(takers)} {'has' if len(takers) == 1 else 'have'}."
    listing = "sidebyside explain" if owner is None else f"sidebyside explain --of {owner}"
    if argument in OWNERS:
        return f"{argument!r} is no argument but has some: `sidebyside explain --of {argument}` lists them."
    hint = _hint(argument, {explanation.argument for explanation in of_owner})
    return f"there is no argument {argument!r}: {hint}`{listing}` lists them all."


def _hint(asked: str, names: Iterable[str]) -> str:
    near = difflib.get_close_matches(asked, list(names), cutoff=0.5)
    return f"did you mean {' or '.join(near)}? " if near else ""


def arguments_of(owner: str) -> list[Explanation]:
    """List the explanations of all that a class or function takes, in the order of its signatures.

    Args:
        owner: A key of ``OWNERS``.

    Returns:
        One explanation for each argument.

    >>> [explanation.argument for explanation in arguments_of("generate_square_subsequent_mask")]
    ['sz', 'device', 'dtype']
    """
    explained = {explanation.argument: explanation for explanation in EXPLANATIONS if owner in explanation.owners}
    return [explained[argument] for _, signature in calls_of(owner) for argument in signature.parameters]
