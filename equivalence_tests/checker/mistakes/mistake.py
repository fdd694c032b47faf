"""A mistake: its words, where its line is found, and what makes it of right code."""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

Change = tuple[str, str]
MODEL = re.compile(r"\b[A-Z]\w*(?: v?\d|-\w+|(?<=\w[A-Z0-9])\w*)")  # more than a word that begins a sentence


@dataclass(frozen=True)
class Mistake:
    """One way to get it wrong."""

    name: str  # a short stable identifier
    stage: str  # where it stands
    # What is wrong, in one plain sentence. This and the next three may hold numbers, as {fill:g}.
    sentence: str
    have: str  # the formula that the code computes
    want: str  # the formula that it should compute
    fix: str  # what to change
    on_purpose_in: str = ""  # which well-known models do this on purpose, and why; "" if none does
    named: bool = True  # whether a class that is named after one of them means it so
    # What runs at its line, the likeliest first, where the output shows the mistake and no single operation does:
    # "std", "last mul", "end" for the line that gives the output, "call" for that which calls the part.
    ran: str = ""
    cost: int = 4  # how far a reading of a mask is from right in which this deviates; the nearest reading is reported
    by_query: bool = False  # whether only a mask with a row for each sample and query shows it
    # Whether queries, keys and values stand in one another's place: how each is rotated follows from that.
    roles: bool = False
    chosen: bool = False  # whether it is a factor that a caller who chooses the scale may have chosen
    sink: bool = False  # whether it is how a learnt share of every row looks, where a parameter lies beside the scores
    # The beginnings of the names of a part's mistakes from which this follows in a whole model.
    follows: tuple[str, ...] = ()
    right: str = ""  # the right code of ``zoo.right`` that ``changes`` break; "" where the zoo holds a class with it
    changes: tuple[Change, ...] = ()  # what to replace in that by what

    def as_named(self, owners: Iterable[str]) -> str:
        """Say which class is named after a model that does this on purpose; "" if none is.

        >>> Mistake("scale_missing", "scale", "", "", "", "", on_purpose_in="T5 has none.").as_named(["T5Attention"])
        'T5Attention is named after T5, which does so'
        """
        for model in MODEL.findall(self.on_purpose_in) if self.named else ():
            spelt = re.sub(r"[ -]", "[ _-]?", model)
            named = re.compile(rf"(?:^|_|(?<=[a-z0-9]))(?i:{spelt})(?![a-z])")
            owner = next(filter(named.search, owners), None)
            if owner is not None:
                return f"{owner} is named after {model}, which does so"
        return ""


def rows(stage: str, want: str = "", right: str = "cross", **shared: Any) -> Callable[..., Mistake]:
    """Give row(name, sentence, have, fix, *changes), which makes the mistakes of one stage from what they share.

    That is the right formula, where ``have`` is not a pair of what the code computes and the right one, the right code
    that changes break, and other columns.
    """

    def row(
        name: str, sentence: str, have: str | tuple[str, str], fix: str, *changes: Change, of: str = right, **more: Any
    ) -> Mistake:
        formulas = have if isinstance(have, tuple) else (have, want)
        made = {"right": of, "changes": changes} if changes else {}
        return Mistake(name, stage, sentence, *formulas, fix, **shared | more | made)

    return row
