"""The figures in README and the tables in benchmarks/results, from the results that are committed."""

import io
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from rich.console import Console

from benchmarks.advice import advice_by_case, fastest
from benchmarks.aims import Outcome, outcomes
from benchmarks.contenders import BASELINE
from benchmarks.grids import SETTINGS, Case, label_of
from benchmarks.plots import at_a_glance, is_plain
from benchmarks.results import Row, ratio_between, read_rows
from benchmarks.summary import in_sentences
from benchmarks.tables import NO_RESULT, bytes_in_words, cost_in_words, groups_of, time_in_words
from equivalence_tests.learn.page.speed import SHOWN
from scratch.validation import ArgumentValueError

__all__ = ["README", "RESULTS", "advice_in_words", "goals", "highlights", "renewed", "tables"]

HERE = Path(__file__).parent
README = HERE.parent / "README.md"
RESULTS = HERE / "results"
BEGIN, END = "<!-- benchmarks: begin -->", "<!-- benchmarks: end -->"
ADVICE_BEGIN = "<!-- advice: begin -->"
GLANCE = "at-a-glance.svg"
SPENT_ON = (
    *("case", "", "time", "products", "fused kernel", "other arithmetic", "copies", "overhead"),
    *("rate of the products", "page faults"),
)


def renewed(results: Path = RESULTS, readme: Path = README) -> dict[Path, str]:
    """Make everything anew that follows from the committed results.

    Args:
        results: Holds a folder for each machine, and a README.
        readme: The project's.

    Returns:
        The text of each file: both READMEs, and the plot of each machine.

    Raises:
        ValueError: If a README lacks the two comments between which the figures stand, if a file of results cannot be
            read, or if matplotlib is missing.
    """
    machines = {path.parent: read_rows(path) for path in sorted(results.glob("*/results.jsonl"))}
    plots = {folder / GLANCE: at_a_glance(rows) for folder, rows in machines.items()}
    plots = {path: svg for path, svg in plots.items() if svg}
    where = results.relative_to(readme.parent)
    shown = [(folder, rows) for folder, rows in machines.items() if folder.name == SHOWN]
    front = [highlights(rows, where / folder.name, with_plot=folder / GLANCE in plots) for folder, rows in shown]
    advice = [advice_in_words(rows, where / folder.name / "results.jsonl") for folder, rows in shown]
    full = [tables(rows, folder.name, with_plot=folder / GLANCE in plots) for folder, rows in machines.items()]
    nothing = ["Nothing has been measured yet; `make benchmark` does it."]
    inner = results / "README.md"
    return {
        readme: _between_comments(readme, {ADVICE_BEGIN: "".join(advice or nothing), BEGIN: "".join(front or nothing)}),
        inner: _between_comments(inner, {BEGIN: "\n\n".join(full or nothing)}),
        **plots,
    }


def _between_comments(path: Path, texts: Mapping[str, str]) -> str:
    found = path.read_text(encoding="utf-8") if path.exists() else ""
    for begin, text in texts.items():
        end = begin.replace("begin", "end")
        before, has_begin, rest = found.partition(begin)
        _, has_end, after = rest.partition(end)
        if not has_begin or not has_end:
            raise ArgumentValueError(f"{path} must have the comments {begin} and {end}")
        found = f"{before}{begin}\n{text}\n{end}{after}"
    return found


def advice_in_words(rows: Sequence[Row], path: Path) -> str:
    """Write what ``sidebyside-bench report`` recommends for the two longest plain cases of self-attention.

    Args:
        rows: Results of one machine.
        path: Where they are, as README names it.

    Returns:
        A block of Markdown, as a terminal of 100 columns shows it.
    """
    plain = [x for x in advice_by_case(rows) if x.case.component == "self_attention" and is_plain(x.case)]
    forward = [x for x in plain if x.case.mode == "forward" and x.undecided is None]
    page = io.StringIO()
    screen = Console(file=page, width=100, highlight=False)
    for advice in sorted(forward, key=lambda x: x.case.query_len)[-2:]:
        screen.print(in_sentences([advice]), "...", sep="\n", markup=False)
    lines = "\n".join(line.rstrip() for line in page.getvalue().splitlines())
    return f"```text\n$ sidebyside-bench report {path}\n...\n{lines}\n```"


def highlights(rows: Sequence[Row], folder: Path, *, with_plot: bool) -> str:
    """Write how fast scratch is in four lines: the module, the function, beside its peers, and decoding.

    Args:
        rows: Results of one machine.
        folder: Where they are, as README links to it.
        with_plot: Whether there is a plot to show.

    Returns:
        Markdown; a line of which nothing was measured is left out.
    """
    lines = [*_module_lines(rows), *_function_lines(rows), *_peer_lines(rows), *_decoding_lines(rows)]
    plot = [f"\n![Time of scratch over time of torch.nn, against the length]({folder / GLANCE})"] if with_plot else []
    return "\n".join([f"On {rows[0].environment}, {label_of(rows[0].case, ['threads'])}:\n", *lines, *plot])


def _module_lines(rows: Sequence[Row]) -> Iterator[str]:
    in_eval, training = (_by_length(rows, "self_attention", mode, "torch.nn") for mode in ("forward", "backward"))
    if in_eval and training:
        memory = _memory(in_eval[-1][0]) / max(_memory(in_eval[-1][1]), 1)
        yield (
            f"- `MultiheadAttention` ({_sizes(in_eval[0][0].case)}), {_lengths(in_eval)}: {_range(in_eval)} the time "
            f"of `torch.nn` in eval and {_range(training)} in training; {memory:.2f}× the memory in eval at length "
            f"{in_eval[-1][0].case.query_len}."
        )


def _function_lines(rows: Sequence[Row]) -> Iterator[str]:
    plain, causal, window = (
        _by_length(rows, "attention", "forward", against, mask)
        for against, mask in (("flash", None), ("flash", "causal"), ("torch.nn", "window"))
    )
    if plain and causal and window:
        longest = window[-1][0].case
        yield (
            f"- `scaled_dot_product_attention`, {_lengths(plain)}: {_range(plain)} the time of torch's flash kernel; "
            f"with a causal mask, {_lengths(causal)}, {_range(causal)}; at length {longest.query_len} with a window of "
            f"{longest.window}, {_range(window[-1:])} the time of `torch.nn`, because it skips what no query may see."
        )


def _peer_lines(rows: Sequence[Row]) -> Iterator[str]:
    """Compare with the naive form, the one that is written most."""
    in_eval, causal, training = (
        _by_length(rows, "attention", mode, "naive", mask)
        for mode, mask in (("forward", None), ("forward", "causal"), ("backward", None))
    )
    if in_eval and causal and training:
        yield (
            f"- Beside attention as it is usually written, `softmax(q @ k.T / sqrt(d)) @ v`: {_range(in_eval)} its "
            f"time at {_lengths(in_eval)}; with a causal mask, {_lengths(causal)}, {_range(causal)}; in training, "
            f"{_lengths(training)}, {_range(training)}."
        )


def _decoding_lines(rows: Sequence[Row]) -> Iterator[str]:
    found = _by_length(rows, "generate", "forward", "scratch recomputed")
    if found:
        gains = _range([(recomputed, cached) for cached, recomputed in found], ".1f").replace("×", " times")
        yield f"- Decoding {_lengths(found).split(' ', 1)[1]} tokens: {gains} as fast with the cache as without."


def _by_length(
    rows: Sequence[Row], component: str, mode: str, against: str, mask: str | None = None
) -> list[tuple[Row, Row]]:
    """Pair scratch with another contender in all cases of a kind in which both were timed, the shortest first."""
    timed = {(row.case, row.contender): row for row in rows if row.status == "timed"}
    pairs = [
        (row, timed[case, against])
        for (case, contender), row in timed.items()
        if contender == "scratch" and (case, against) in timed and (case.component, case.mode) == (component, mode)
        if (is_plain(case) if mask is None else case.mask == mask)
    ]
    most_threads = max((row.case.threads for row, _ in pairs), default=0)
    batch = pairs[0][0].case.batch if pairs else 0
    same = [x for x in pairs if (x[0].case.threads, x[0].case.batch, x[0].case.key_heads) == (most_threads, batch, 0)]
    return sorted(same, key=lambda pair: pair[0].case.query_len)


def _lengths(pairs: Sequence[tuple[Row, Row]]) -> str:
    first, last = (pairs[place][0].case.query_len for place in (0, -1))
    return f"length {last}" if first == last else f"lengths {first} to {last}"


def _range(pairs: Sequence[tuple[Row, Row]], digits: str = ".2f") -> str:
    """Write the least and the greatest ratio of some pairs."""
    ratios = [ratio_between(*pair).value for pair in pairs]
    low, high = (f"{extreme:{digits}}" for extreme in (min(ratios), max(ratios)))
    return f"{low}×" if low == high else f"{low} to {high}×"


def _memory(row: Row) -> int:
    return row.peak_memory_bytes or 0


def _sizes(case: Case) -> str:
    return label_of(case, ("batch", "embed_dim", "num_heads", "dtype"))


def tables(rows: Sequence[Row], name: str, *, with_plot: bool) -> str:
    """Write everything about one machine: its aims, and a table for each component and mode.

    Args:
        rows: Results.
        name: Of their folder.
        with_plot: Whether there is a plot to show.

    Returns:
        Markdown.
    """
    parts = [f"## {name}", f"{rows[0].environment}. The page, with plots: [{name}/report.html]({name}/report.html)."]
    if with_plot:
        parts.append(f"![Time of scratch over time of torch.nn, against the length]({name}/{GLANCE})")
    if any(outcomes(rows)):
        parts += ["### What scratch aims for", _table(_aim_lines(rows)), *_misses(rows)]
    for (component, mode), group in groups_of(rows).items():
        parts += [f"### {component}, {mode}".replace("_", " "), _table(_case_lines(group))]
    return "\n\n".join(parts)


def _table(lines: Iterator[Sequence[str]]) -> str:
    """Write a table whose first line is its head; numbers stand on the right, so the first column on the left."""
    head, *others = lines
    rule = ["---", *["---:"] * (len(head) - 1)]
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, rule, *others))


def _aim_lines(rows: Sequence[Row]) -> Iterator[Sequence[str]]:
    yield "aim", "compared with", "at most", "", "reached in", "greatest", "where"
    for outcome in outcomes(rows):
        count, worst = len(outcome.ratios), outcome.worst if outcome.ratios else None
        yield (
            outcome.aim.what,
            f"`{outcome.aim.against}`",
            f"{outcome.aim.at_most:g}",
            outcome.verdict,
            f"{count - len(outcome.missed)} of {count}",
            "" if worst is None else _figure(outcome, worst),
            "" if worst is None else str(worst),
        )


def _misses(rows: Sequence[Row]) -> Iterator[str]:
    """List every case above its aim, the farthest first."""
    for outcome in outcomes(rows):
        cases = sorted(outcome.missed, key=lambda case: -outcome.ratios[case].value)
        lines = [f"- {_figure(outcome, case)}: {case}" for case in cases]
        if lines:
            yield f"Above {outcome.aim.at_most:g}, {outcome.aim.what}:\n\n" + "\n".join(lines)
        spent = [] if outcome.aim.of_memory else list(_spent_lines(rows, cases, outcome.aim.against))
        if spent:
            yield "What the time is spent on there:"
            yield _table(iter([(*SPENT_ON,), *spent]))


def _spent_lines(rows: Sequence[Row], cases: Sequence[Case], against: str) -> Iterator[Sequence[str]]:
    """Say what scratch and its rival spend their time on, where both were looked into."""
    by_cell = {(row.case, row.contender): row for row in rows}
    for case in cases:
        for row in (by_cell[case, "scratch"], by_cell[case, against]):
            if row.profile is not None and row.median_us is not None:
                rate, faults = row.profile.matmul_rate, row.profile.page_faults
                yield (
                    str(case),
                    f"`{row.contender}`",
                    time_in_words(row.median_us),
                    *(f"{share:.0%}" for share in row.profile.shares().values()),
                    NO_RESULT if rate is None else f"{rate:.0%}",
                    NO_RESULT if faults is None else str(faults),
                )


def _figure(outcome: Outcome, case: Case) -> str:
    ratio = outcome.ratios[case]
    return f"{ratio.value:.2f}" + ("" if outcome.aim.of_memory else f" ({ratio.low:.2f}–{ratio.high:.2f})")


def goals(results: Path = RESULTS) -> Iterator[str]:
    """Say of each aim whether the committed results meet it, machine by machine.

    Args:
        results: Holds a folder for each machine.

    Yields:
        A line for each aim, and one for each case that misses it.
    """
    for path in sorted(results.glob("*/results.jsonl")):
        found = list(outcomes(read_rows(path)))
        yield from [f"{path.parent.name}:"] if found else []
        for outcome in found:
            aim, count = outcome.aim, len(outcome.ratios)
            greatest = f"; greatest of {count}: {_figure(outcome, outcome.worst)}" if count else ""
            yield f"  {outcome.verdict}: {aim.what}, at most {aim.at_most:g} of {aim.against}{greatest}"
            yield from (f"    {_figure(outcome, case)}: {case}" for case in outcome.missed)


def _case_lines(rows: Sequence[Row]) -> Iterator[Sequence[str]]:
    """Compare scratch with torch.nn, or with builtin where torch.nn has no such thing."""
    by_cell = {(row.case, row.contender): row for row in rows}
    kernel = ["scratch triton"] * any(row.contender == "scratch triton" for row in rows)
    yield "case", "`torch.nn`", "`scratch`", "time", "memory", *(f"`{name}`" for name in kernel), "fastest"
    for case in dict.fromkeys(row.case for row in rows):
        theirs = by_cell.get((case, "torch.nn")) or by_cell.get((case, BASELINE))
        ours = by_cell.get((case, "scratch"))
        best = fastest([row for row in rows if row.case == case])
        yield (
            label_of(case, SETTINGS, usual=False),
            _cost(theirs),
            _cost(ours),
            *_ratios(ours, theirs),
            *(_cost(by_cell.get((case, name))) for name in kernel),
            NO_RESULT if best is None else f"{best.contender}, {cost_in_words(best)}",
        )


def _cost(row: Row | None) -> str:
    if row is None:
        return NO_RESULT
    return row.status if row.median_us is None else cost_in_words(row) + (", unstable" if row.unstable else "")


def _ratios(ours: Row | None, theirs: Row | None) -> tuple[str, str]:
    if ours is None or theirs is None or ours.median_us is None or theirs.median_us is None:
        return NO_RESULT, NO_RESULT
    ratio = ratio_between(ours, theirs)
    memory = _memory(ours) / _memory(theirs) if _memory(theirs) else None
    return (
        f"{ratio.value:.2f} ({ratio.low:.2f}–{ratio.high:.2f})",
        bytes_in_words(_memory(ours)) if memory is None else f"{memory:.2f}",
    )
