"""Find the line that is probably to blame; none rather than a wrong one."""

import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import nn

from equivalence_tests.checker.findings import CodeLine
from equivalence_tests.checker.loading import Source, source_of
from equivalence_tests.checker.mistakes import Mistake

__all__ = ["blamed_line", "related_sources", "told_by"]

PRODUCT = re.compile(r"softmax|matmul|bmm|einsum|@|scaled_dot|\battn?\w*\(|attention\w*\(|\.att\w*\(", re.IGNORECASE)
RESHAPE = re.compile(r"\.(contiguous_)?(view|reshape|flatten)\(|rearrange\(|torch\.(reshape|flatten|cat)\(")
JOINING = re.compile(r"merge|combine|concat|join|from_heads|unsplit|transpose_output", re.IGNORECASE)
SOFTMAX = re.compile(r"softmax", re.IGNORECASE)
HIDING = re.compile(r"masked_fill|where\(|\*=?\s*\(?~?\w*mask|mask\w*\s*\*", re.IGNORECASE)


def related_sources(target: Any, source: Source) -> list[Source]:
    """List the source of a class first, then of what it is made of in the same package.

    Args:
        target: The module or function.
        source: Its own source.

    Returns:
        Its source, its base classes', its sub-modules' and that of the functions and classes that it names.
    """
    owners: list[Any] = [*type(target).__mro__] if isinstance(target, nn.Module) else []
    owners += [type(child) for child in target.modules()] if isinstance(target, nn.Module) else []
    owners += _named_in(source.text, target)
    found = {source.text: source}
    for owner in owners:  # grows while it is walked: what is named may name more
        place = source_of(owner)
        if not getattr(owner, "__module__", "").startswith(("torch", "builtins")) and place.text not in found:
            found[place.text] = place
            owners += _named_in(place.text, owner)
    return [place for text, place in found.items() if text]


def _named_in(text: str, target: Any) -> list[Any]:
    """List the functions and classes of the same file that a text names."""
    home = getattr(target, "__module__", "") or type(target).__module__
    names = set(re.findall(r"\w+", text))
    members = vars(sys.modules[home]).items() if home in sys.modules else ()
    found = [
        value for name, value in members if name in names and (inspect.isfunction(value) or inspect.isclass(value))
    ]
    return [value for value in found if value.__module__ == home]


def told_by(mistakes: tuple[Mistake, ...], places: list[Source]) -> int:
    """Count the mistakes whose most telling pattern is found in the source; twice where the class itself shows it."""
    return sum(_told(m, places[:1]) + _told(m, places) for m in mistakes if m.tell)


def _told(mistake: Mistake, places: list[Source]) -> bool:
    return any(place.line_matching(mistake.tell) for place in places)


def blamed_line(mistake: Mistake, places: list[Source]) -> tuple[CodeLine, ...]:
    """Give the line that is probably to blame; nothing if none is telling."""
    special = {"merge": _merging_lines, "mask": _masking_lines}.get(mistake.slot)
    for place in places:
        for number, line in special(mistake, place) if special else ():
            return (CodeLine(Path(place.path).name, number, line.strip()),)
    both = [rf"(?=.*({mistake.tell}))(?=.*({pattern}))" for pattern in mistake.patterns if mistake.tell]
    for pattern in (*both, *mistake.patterns, *((mistake.tell,) if mistake.tell else ())):
        for place in places:
            found = place.line_matching(pattern)
            if found is not None:
                return (CodeLine(Path(place.path).name, *found),)
    return ()


def _joins(line: str) -> bool:
    """Whether a line reshapes to at most three axes."""
    found = RESHAPE.search(line)
    while found and (plain := re.sub(r"[(\[][^()\[\]]*[)\]]", "", line[found.end() :])) != line[found.end() :]:
        line = line[: found.end()] + plain
    return found is not None and line[found.end() :].partition(")")[0].count(",") <= 2


def _merging_lines(_: Mistake, place: Source) -> Iterator[tuple[int, str]]:
    """Reshapes in a function that puts heads together, then those after the last product."""
    functions = place.functions()
    for name, lines in functions:
        if JOINING.search(name):
            yield from (item for item in reversed(lines) if _joins(item[1]))
    for _name, lines in functions:
        products = [index for index, (_n, line) in enumerate(lines) if PRODUCT.search(line)]
        if products:
            first, *rest = lines[products[-1] :]
            if any(_joins(first[1][product.end() :]) for product in PRODUCT.finditer(first[1])):
                yield first
            yield from (item for item in rest if _joins(item[1]))


def _masking_lines(mistake: Mistake, place: Source) -> Iterator[tuple[int, str]]:
    """For a mask after the softmax, the first line after it that hides anything."""
    if not mistake.option.startswith("after_softmax"):
        return
    for _name, lines in place.functions():
        softmax = next((index for index, (_n, line) in enumerate(lines) if SOFTMAX.search(line)), len(lines))
        yield from (item for item in lines[softmax:] if HIDING.search(item[1]))
