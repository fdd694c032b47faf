"""The table in README, from the results that are committed."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.advice import fastest
from benchmarks.cases import TOKEN_LEVEL, Case
from benchmarks.contenders import BASELINE
from benchmarks.results import Row, read_rows
from benchmarks.tables import bytes_in_words, groups_of, label_of, time_in_words
from scratch.validation import ArgumentValueError

__all__ = ["README", "renewed_readme", "summary"]

HERE = Path(__file__).parent
README = HERE.parent / "README.md"
BEGIN, END = "<!-- benchmarks: begin -->", "<!-- benchmarks: end -->"
SHAPE = ("batch", "query_len", "key_len", "embed_dim", "num_heads", "num_layers")


def renewed_readme(folder: Path = HERE / "results", readme: Path = README) -> str:
    """Give README with its table made anew.

    Args:
        folder: Holds a folder for each machine, with its results.
        readme: The file.

    Returns:
        Its text.

    Raises:
        ValueError: If README does not have the two comments between which the table stands, or a file of results
            cannot be read.
    """
    text = readme.read_text(encoding="utf-8") if readme.exists() else ""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ArgumentValueError(f"{readme} must have the comments {BEGIN} and {END}")
    tables = [summary(read_rows(path)) for path in sorted(folder.glob("*/results.jsonl"))]
    table = "\n\n".join(tables) or "Nothing is measured yet; `make benchmark` does it."
    return f"{before}{BEGIN}\n{table}\n{END}{after}"


def summary(rows: Sequence[Row]) -> str:
    """Write the longest case of each component and mode as a table in Markdown.

    Args:
        rows: Results of one machine.

    Returns:
        A line about the machine, and the table.
    """
    environment = f"{rows[0].environment}, {label_of(rows[0].case, ['threads'])}"
    head = ["", "shape", "`builtin`", "`scratch`", "ratio", "fastest"]
    lines = [head, ["---", "---", "---:", "---:", "---:", "---"], *_lines(rows)]
    return f"{environment}:\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _lines(rows: Sequence[Row]) -> Iterator[list[str]]:
    for (component, mode), group in groups_of(rows).items():
        case = _longest([row for row in group if _is_plain(row.case)])
        if case is not None:
            found = {row.contender: row for row in group if row.case == case}
            ours, theirs, best = found["scratch"], found[BASELINE], fastest(list(found.values()))
            assert best is not None  # both were timed
            what = f"{component}, {mode}".replace("_", " ")
            ratio = f"{ours.ratio_to_builtin:.2f} ({ours.ratio_low:.2f}–{ours.ratio_high:.2f})"
            yield [what, label_of(case, SHAPE), _cost(theirs), _cost(ours), ratio, best.contender]


def _is_plain(case: Case) -> bool:
    mask = "causal" if case.component in TOKEN_LEVEL or case.component == "transformer" else "none"
    return case.dtype == "float32" and case.mask == mask and not case.need_weights and not case.compiled


def _longest(rows: Sequence[Row]) -> Case | None:
    timed = {(row.case, row.contender) for row in rows if row.status == "timed"}
    both = [row.case for row in rows if (row.case, "scratch") in timed and (row.case, BASELINE) in timed]
    return max(both, key=lambda case: case.query_len, default=None)


def _cost(row: Row) -> str:
    assert row.median_us is not None
    return f"{time_in_words(row.median_us)}, {bytes_in_words(row.peak_memory_bytes or 0)}"
