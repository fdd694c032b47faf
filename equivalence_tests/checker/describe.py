"""Put what was found into words: conventions for the table, mistakes as findings with their evidence."""

from pathlib import Path

import torch

from equivalence_tests.checker.attention import AttentionExamination, MaskReading, observe
from equivalence_tests.checker.calling import CallPlan
from equivalence_tests.checker.construction import Sizes, prepare
from equivalence_tests.checker.diagnosis import Match, distance
from equivalence_tests.checker.loading import Source
from equivalence_tests.checker.mistakes import STRUCTURE, Mistake, named_mistake
from equivalence_tests.checker.reference import attend
from equivalence_tests.checker.report import Finding

__all__ = ["conventions_of", "findings_of", "guilty_line"]

Row = tuple[str, str, str]
LAYOUT_WORDS = {
    "b l e": "(batch, len, features)",
    "l b e": "(len, batch, features)",
    "b h l d": "(batch, heads, len, head_dim)",
    "b l h d": "(batch, len, heads, head_dim)",
    "l e": "(len, features)",
}
WRAP_WORDS = {
    "none": "attention alone",
    "residual": "+ residual",
    "post_norm": "+ residual, then LayerNorm (post-norm)",
    "pre_norm": "+ LayerNorm on the input (pre-norm)",
    "pre_norm_residual": "+ LayerNorm on the input (pre-norm), + residual",
    "pre_norm_query_only": "+ LayerNorm on the query (pre-norm)",
    "pre_norm_residual_query_only": "+ LayerNorm on the query (pre-norm), + residual",
}
PACKED_WORDS = {
    "3hd": "rows are [q; k; v]",
    "h3d": "rows are [q, k, v] for each head in turn",
    "hd3": "rows are q, k, v for each element in turn",
    "2hd": "rows are [k; v]",
    "h2d": "rows are [k, v] for each head in turn",
    "hd2": "rows are k, v for each element in turn",
}
FRESH_BATCH = 50


def conventions_of(examination: AttentionExamination) -> list[Row]:
    """Say how the code is called and laid out, beside torch's way.

    Args:
        examination: With or without a match.

    Returns:
        (what, in this code, in torch.nn), a handful of rows.
    """
    match = examination.match
    plan = match.reading.plan if match is not None else examination.plans[0]
    rows = [("arguments", _arguments_words(plan), "forward(query, key, value, ...)")]
    rows.append(("layout", LAYOUT_WORDS[plan.layout], "(len, batch, features) unless batch_first"))
    if match is None:
        return rows
    options = dict(match.reading.conventions)
    rows += _projection_rows(examination, match)
    wrap = options.get("wrap", "none")
    rows.append(("includes", WRAP_WORDS.get(wrap, wrap), "attention alone"))
    if options.get("causal") == "yes" and "attend_over" not in match.choices:  # tokens that see no other look causal
        rows.append(("causal mask", "built in", "attn_mask, given in each call"))
    return rows + _mask_rows(plan, examination.masks)


def _arguments_words(plan: CallPlan) -> str:
    words = {"input": "query = key = value", "memory": "key = value", "mask?": "mask"}
    return ", ".join(
        name if words.get(role, role) == name else f"{name}: {words.get(role, role)}" for name, role in plan.roles
    )


def _projection_rows(examination: AttentionExamination, match: Match) -> list[Row]:
    reading, heads = match.reading.projections, str(match.reading.setting.num_heads)
    if reading is None:
        return [("heads", heads, "")]
    names = ", ".join(leaf.name for leaf in reading.leaves)
    packed = reading.layout.removeprefix("qkv").removeprefix("kv")
    detail = f"{names}: {PACKED_WORDS[packed]}" if packed in PACKED_WORDS else f"{names} ({reading.order})"
    if reading.layout != "separate" and reading.order != "qkv":
        detail += f", in the order {', '.join(reading.order)}"
    projections = match.reading.read(examination.subject.function)
    parts = {"q": projections.query, "k": projections.key, "v": projections.value, "out": projections.output}
    biased = [name for name, part in parts.items() if part is not None and part.bias is not None]
    bias = "on all" if len(biased) == len([p for p in parts.values() if p is not None]) else f"on {', '.join(biased)}"
    output = reading.output.name if reading.output is not None else "none: the heads side by side come back"
    return [
        ("heads", heads, "num_heads"),
        ("projections", detail, "in_proj_weight: rows are [q; k; v]"),
        ("output projection", output, "out_proj"),
        ("biases", bias if biased else "none", "on all, or none"),
    ]


def _mask_rows(plan: CallPlan, masks: MaskReading) -> list[Row]:
    if masks.form is None:
        return []
    name = plan.mask_parameter.rstrip("?") or "mask"
    return [(f"mask ({name})", str(masks.form), "attn_mask: True = may not look, or added")]


def findings_of(examination: AttentionExamination, file_source: Source) -> list[Finding]:
    """Turn the mistakes of a match into findings with their evidence.

    Args:
        examination: With a match.
        file_source: The source of the whole file, for lines outside the class.

    Returns:
        One finding for each mistake; empty for correct code.
    """
    match = examination.match
    if match is None:
        return []
    match = max(examination.matches, key=lambda m: _told_by_source(m.mistakes, examination.subject.source))
    findings = [_structural(name, examination) for name in match.reading.implied]
    error, without, count = confirm(examination, match)
    evidence = (
        f"reproduces your output to {error:.0e} of its largest value on {count} fresh inputs and other weights; "
        f"without it the difference is {without:.2g}"
    )
    others = [m for m in examination.matches if m.names != match.names]
    for index, mistake in enumerate(dict.fromkeys(match.mistakes)):
        alternatives = tuple(
            m.mistakes[index].sentence
            for m in others
            if len(m.mistakes) > index and m.mistakes[index].name != mistake.name
        )
        findings.append(_finding(mistake, evidence, examination.subject.source, file_source, alternatives))
    findings += _mask_findings(examination, file_source)
    return findings


def _told_by_source(mistakes: tuple[Mistake, ...], source: Source) -> int:
    """Count the mistakes whose most telling pattern is found in the source."""
    return sum(bool(m.tell) and source.line_matching(m.tell) is not None for m in mistakes)


def likeliest_first(mistakes: list[Mistake], source: Source) -> list[Mistake]:
    """Order mistakes that give the same numbers by what the source says."""
    return sorted(mistakes, key=lambda m: -_told_by_source((m,), source))


def _mask_findings(examination: AttentionExamination, file_source: Source) -> list[Finding]:
    masks = examination.masks
    if not masks.mistakes:
        return []
    candidates = likeliest_first(list(masks.mistakes), examination.subject.source)
    first = candidates[0]
    form = (
        f"with the mask as {masks.form}"
        if first.option != "ignored"
        else f"for all {len(masks.accepted)} forms of mask"
    )
    evidence = (
        f"reproduces your output to {masks.error:.0e} of its largest value {form}; "
        f"a mask that works differs by {masks.without:.2g}"
    )
    alternatives = tuple(dict.fromkeys(m.sentence for m in candidates[1:] if m.name != first.name))
    return [_finding(first, evidence, examination.subject.source, file_source, alternatives)]


def _finding(
    mistake: Mistake, evidence: str, source: Source, file_source: Source, alternatives: tuple[str, ...]
) -> Finding:
    return Finding(
        mistake.name,
        mistake.sentence,
        mistake.have,
        mistake.want,
        mistake.fix,
        evidence,
        guilty_line(mistake.patterns, source, file_source),
        mistake.choice,
        alternatives,
    )


def _structural(name: str, examination: AttentionExamination) -> Finding:
    mistake = STRUCTURE.get(name) or named_mistake(name)
    evidence = "the parameters show it, and the output agrees to rounding"
    source = examination.subject.source
    return _finding(mistake, evidence, source, source, ())


def guilty_line(patterns: tuple[str, ...], source: Source, file_source: Source) -> str:
    """Name the line that is probably to blame: "file.py:12: the line"; "" if none is found."""
    for place in (source, file_source):
        found = place.line_matching(*patterns)
        if found is not None:
            return f"{Path(place.path).name}:{found[0]}: {found[1]}"
    return ""


def confirm(examination: AttentionExamination, match: Match) -> tuple[float, float, int]:
    """Try a match on fresh inputs of other sizes and on other weights.

    Args:
        examination: Holds the code.
        match: A reading with its mistakes.

    Returns:
        The greatest relative difference with the mistakes, the least without them, and the number of inputs.
    """
    module = examination.subject.module
    with_mistakes, without, count = 0.0, float("inf"), 0
    saved = {} if module is None else {name: x.clone() for name, x in module.state_dict().items()}
    for seed, (query_len, key_len) in enumerate(((6, 9), (4, 7), (8, 3), (3, 6)), start=300):
        equal = examination.lengths.query_len == examination.lengths.key_len
        lengths = (query_len, query_len if equal else key_len)
        if module is not None:
            prepare(module, examination.subject.dtype, seed)
        seen = observe(examination.caller, match.reading.plan, _with(examination.lengths, *lengths), seed)
        if seen is None:
            continue
        projections = match.reading.read(examination.subject.function)
        setting, plain = match.reading.setting, dict(match.reading.conventions)
        with torch.no_grad():
            with_mistakes = max(
                with_mistakes, distance(seen.output, attend(setting, projections, seen.inputs, match.choices))
            )
            without = min(without, distance(seen.output, attend(setting, projections, seen.inputs, plain)))
        count += len(seen.inputs.query)
    if module is not None:
        module.load_state_dict(saved)
    return with_mistakes, without, count


def _with(sizes: Sizes, query_len: int, key_len: int) -> Sizes:
    return Sizes(FRESH_BATCH, sizes.num_heads, query_len, key_len, sizes.head_dim)
