"""Results as one page of HTML that needs nothing else: advice, plots, tables, and how it was measured."""

from collections.abc import Iterator, Sequence
from html import escape

from benchmarks.advice import advice_by_case
from benchmarks.contenders import BASELINE, CONTENDERS
from benchmarks.growth import growths
from benchmarks.plots import Picture, svg_of
from benchmarks.results import Row
from benchmarks.tables import (
    bytes_in_words,
    contenders_in,
    groups_of,
    label_of,
    shared_settings,
    time_in_words,
    varying_label,
)

__all__ = ["html_page"]

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
h1, h2 { line-height: 1.2; } h2 { margin-top: 2.5rem; }
table { border-collapse: collapse; margin: 1rem 0; font-size: 13px; }
th, td { padding: .35rem .7rem; border-bottom: 1px solid #ddd; text-align: right; vertical-align: top; }
th:first-child, td:first-child { text-align: left; }
small { color: #666; display: block; white-space: nowrap; }
.slower { color: #b3261e; } .faster { color: #1b7f3b; } .same { color: #8a6d00; } .missing { color: #999; }
.wrong { color: #b3261e; font-weight: bold; }
svg { max-width: 100%; height: auto; } .wide { overflow-x: auto; }
"""
METHOD = """
<p>Before anything is timed, the outputs of each contender, and in backward passes all gradients, are compared with
those of <b>builtin</b>; what differs more than rounding explains is not timed. All contenders of a case then run in
turns, A B C A B C, so that other work on the machine slows all of them. Of <b>builtin</b> and <b>scratch</b> the checks
of arguments are timed too, about ten microseconds a call, which tell at the shortest lengths beside code without any.
Times are medians over the rounds. A ratio is the median of the ratios round by round, with the 95% interval of a
bootstrap; where the interval holds 1 it is shown in yellow. ~ marks times whose middle half spreads over more than a
tenth of the median, also when timed again. Memory is the most that one run held beyond weights and inputs. Operations
are counted by formulas that are the same for every contender, and count hidden scores too; the share is that of the
best rate of large matrix products measured in the same run, and a kernel that leaves hidden scores out may come to more
than all of it. "At least" is the roofline bound, where nothing is hidden: the time that arithmetic or memory alone
would take at the rates measured.</p>
"""


def html_page(rows: Sequence[Row], drawn: Sequence[Picture]) -> str:
    """Write the page.

    Args:
        rows: Results.
        drawn: Figures, which are put into it.

    Returns:
        HTML.
    """
    grounds = dict.fromkeys(f"{row.environment}; {label_of(row.case, ['threads'])}" for row in rows)
    commits = dict.fromkeys(row.environment.commit for row in rows if row.environment.commit)
    parts = [
        "<h1>Attention, side by side</h1>",
        *(f"<p>{escape(ground)}</p>" for ground in grounds),
        *(f"<p>{escape(state)}</p>" for state in dict.fromkeys(row.environment.gpu_state for row in rows) if state),
        f"<p>Measured {escape(rows[0].environment.measured_at)}, commit {escape(', '.join(commits) or 'unknown')}.</p>",
        "<h2>What to use</h2>",
        *_advice(rows),
        "<h2>Against the length</h2>" if drawn else "",
        *(f'<div class="wide">{svg_of(picture)}</div>' for picture in drawn),
        *_growth(rows),
        "<h2>Everything</h2>",
        *(part for group in groups_of(rows).values() for part in _group(group)),
        "<h2>Who takes part</h2>",
        *_who(rows),
        "<h2>How it was measured</h2>",
        METHOD,
    ]
    head = f'<meta charset="utf-8"><title>Attention, side by side</title><style>{STYLE}</style>'
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n' + "\n".join(parts) + "\n</body></html>\n"


def _advice(rows: Sequence[Row]) -> Iterator[str]:
    yield "<ul>"
    for case, sentence in advice_by_case(rows):
        yield f"<li><b>{escape(str(case))}</b>: {escape(sentence)}</li>"
    yield "</ul>"


def _growth(rows: Sequence[Row]) -> Iterator[str]:
    found = growths(rows)
    if not found:
        return
    yield "<p>Exponents p of cost = c · length<sup>p</sup>:</p>"
    yield "<table><tr><th>case</th><th>contender</th><th>lengths</th><th>time</th><th>memory</th></tr>"
    for growth in found:
        memory = "" if growth.memory is None else f"{growth.memory:.2f}"
        lengths = f"{growth.lengths[0]} to {growth.lengths[-1]}"
        cells = (str(growth.case), growth.contender, lengths, f"{growth.time:.2f}", memory)
        yield "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>"
    yield "</table>"


def _group(rows: Sequence[Row]) -> Iterator[str]:
    case = rows[0].case
    names = contenders_in(rows)
    by_cell = {(row.case, row.contender): row for row in rows}
    yield f"<h3>{escape(f'{case.component}, {case.mode}'.replace('_', ' '))}</h3><p>{escape(shared_settings(rows))}</p>"
    yield '<div class="wide"><table><tr><th></th>' + "".join(f"<th>{escape(name)}</th>" for name in names) + "</tr>"
    for other in dict.fromkeys(row.case for row in rows):
        cells = "".join(f"<td>{_cell(by_cell.get((other, name)))}</td>" for name in names)
        yield f"<tr><td>{escape(varying_label(other, rows))}</td>{cells}</tr>"
    yield "</table></div>"


def _cell(row: Row | None) -> str:
    if row is None:
        return ""
    if row.median_us is None:
        kind = "wrong" if row.status == "unequal" else "missing"
        return f'<span class="{kind}" title="{escape(row.detail)}">{escape(row.status)}</span>'
    return "".join([f"{time_in_words(row.median_us)}{'~' if row.is_unstable else ''}", *_small_print(row)])


def _small_print(row: Row) -> Iterator[str]:
    if row.contender != BASELINE and row.ratio_low is not None and row.ratio_high is not None:
        kind = "slower" if row.ratio_low > 1 else "faster" if row.ratio_high < 1 else "same"
        interval = f"({row.ratio_low:.2f}–{row.ratio_high:.2f})"
        yield f'<small class="{kind}">× {row.ratio_to_builtin:.2f} {interval}</small>'
    yield f"<small>{bytes_in_words(row.peak_memory_bytes or 0)}</small>"
    if row.flops_per_s is not None and row.share_of_matmul_rate is not None:
        yield f"<small>{row.flops_per_s / 1e9:.3g} GFLOP/s, {row.share_of_matmul_rate:.0%}</small>"
    if row.tokens_per_s is not None:
        yield f"<small>{row.tokens_per_s:.0f} tokens/s</small>"
    if row.roofline_us is not None:
        yield f"<small>at least {time_in_words(row.roofline_us)}</small>"


def _who(rows: Sequence[Row]) -> Iterator[str]:
    yield "<ul>"
    for name in contenders_in(rows):
        meaning = CONTENDERS[name].meaning if name in CONTENDERS else "your own"
        yield f"<li><b>{escape(name)}</b>: {escape(meaning)}</li>"
    yield "</ul>"
