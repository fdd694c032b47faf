"""All exercises, in the order in which they are done."""

import difflib

from equivalence_tests.learn.practice import by_hand, with_torch
from equivalence_tests.learn.practice.exercise import Exercise

__all__ = ["EXERCISES", "find_exercise", "number_of"]

# By hand first, then the same with torch.
EXERCISES: tuple[Exercise, ...] = tuple(
    exercise for pair in zip(by_hand.EXERCISES, with_torch.EXERCISES, strict=True) for exercise in pair
)


def find_exercise(name_or_number: str) -> Exercise:
    """Look an exercise up.

    Args:
        name_or_number: As the list shows it.

    Returns:
        The exercise.

    Raises:
        LookupError: If there is none, with the nearest name.

    >>> find_exercise("1").name
    'scale'
    """
    names = [exercise.name for exercise in EXERCISES]
    if name_or_number in names:
        return EXERCISES[names.index(name_or_number)]
    if name_or_number.isdecimal() and 1 <= int(name_or_number) <= len(EXERCISES):
        return EXERCISES[int(name_or_number) - 1]
    near = difflib.get_close_matches(name_or_number, names, 1)
    hint = f": did you mean {near[0]}?" if near else f": they are {', '.join(names)}, or 1 to {len(names)}"
    raise LookupError(f"there is no exercise {name_or_number!r}{hint}")


def number_of(exercise: Exercise) -> int:
    """Give the place of an exercise in the list, from 1."""
    return EXERCISES.index(exercise) + 1
