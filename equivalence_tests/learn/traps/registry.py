"""The list of all traps, and how to find one."""

import difflib
from typing import Any

from equivalence_tests.learn.traps import (
    attention_maps,
    causal,
    compiling,
    devices,
    fast_path,
    flex,
    libraries,
    masks,
    parameters,
    sdpa,
    stacks,
    todays,
    varlen,
)
from equivalence_tests.learn.traps.entry import Trap

__all__ = ["TRAPS", "find_trap", "traps_about"]

MODULES: tuple[Any, ...] = (
    *(masks, causal, attention_maps, parameters, fast_path, stacks, sdpa, flex, varlen, todays),
    *(compiling, devices, libraries),
)

TRAPS: tuple[Trap, ...] = tuple(
    sorted(
        (entry() for module in MODULES for entry in module.TRAPS),
        key=lambda trap: trap.number,
    )
)


def find_trap(name_or_number: str) -> Trap:
    """Find a trap by its name or its number.

    Args:
        name_or_number: As typed: "mask_polarity" or "1".

    Returns:
        The trap.

    Raises:
        LookupError: If there is none, with the names that come near, or with where to look for those of an argument.

    >>> find_trap("1").name
    'mask_polarity'
    """
    for trap in TRAPS:
        if name_or_number in (trap.name, str(trap.number)):
            return trap
    if name_or_number in {concern.rpartition(".")[2] for trap in TRAPS for concern in trap.concerns}:
        raise LookupError(
            f"{name_or_number!r} is an argument: `sidebyside explain {name_or_number}` lists the traps that concern it."
        )
    near = difflib.get_close_matches(name_or_number, [trap.name for trap in TRAPS], cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}?" if near else f"the numbers go from 1 to {TRAPS[-1].number}."
    raise LookupError(f"there is no trap {name_or_number!r}: {hint} `sidebyside traps` lists them all.")


def traps_about(argument: str, owner: str) -> list[Trap]:
    """Find the traps that concern an argument.

    Args:
        argument: Its name.
        owner: The class or function that takes it.

    Returns:
        In the order of their numbers.

    >>> [trap.name for trap in traps_about("average_attn_weights", "MultiheadAttention")]
    ['weights_averaged', 'no_maps_from_layers']
    """
    return [trap for trap in TRAPS if argument in trap.concerns or f"{owner}.{argument}" in trap.concerns]
