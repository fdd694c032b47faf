"""Put what was found into words: conventions for the table, mistakes as findings with their evidence."""

from dataclasses import replace
from pathlib import Path

import torch

from equivalence_tests.checker.attention import AttentionExamination
from equivalence_tests.checker.blame import blamed_line, related_sources, told_by
from equivalence_tests.checker.calling import CallPlan
from equivalence_tests.checker.construction import Sizes, prepare
from equivalence_tests.checker.diagnosis import Match, distance
from equivalence_tests.checker.findings import CodeLine, Finding
from equivalence_tests.checker.inner import words_of
from equivalence_tests.checker.loading import Source
from equivalence_tests.checker.mask_reading import MaskReading
from equivalence_tests.checker.mistakes import STRUCTURE, Mistake, named_mistake
from equivalence_tests.checker.observing import observe
from equivalence_tests.checker.reference import Projections, attend, key_heads

__all__ = ["confirm", "conventions_of", "findings_of", "guilty_line", "structural_finding"]

Row = tuple[str, str, str]
LAYOUT_WORDS = {
    "b l e": "(batch, len, features)",
    "l b e": "(len, batch, features)",
    "b h l d": "(batch, heads, len, head_dim)",
    "b l h d": "(batch, len, heads, head_dim)",
    "l e": "(len, features)",
    "b e l": "(batch, features, len)",
    "b e l 1": "(batch, features, height, width)",
}
WRAP_WORDS = {
    "none": "attention alone",
    "residual": "+ residual",
    "post_norm": "+ residual, then LayerNorm (post-norm)",
    "pre_norm": "+ LayerNorm on the input (pre-norm)",
    "pre_norm_residual": "+ LayerNorm on the input (pre-norm), + residual",
    "pre_norm_query_only": "+ LayerNorm on the query (pre-norm)",
    "pre_norm_residual_query_only": "+ LayerNorm on the query (pre-norm), + residual",
    "pre_norm_keys_only": "+ LayerNorm on keys and values (pre-norm)",
    "pre_norm_residual_keys_only": "+ LayerNorm on keys and values (pre-norm), + residual",
    "merged_norm": "+ LayerNorm on the merged heads (sub-LN)",
}
PACKED_WORDS = {
    "3hd": "rows are [q; k; v]",
    "h3d": "rows are [q, k, v] for each head in turn",
    "hd3": "rows are q, k, v for each element in turn",
    "2hd": "rows are [k; v]",
    "h2d": "rows are [k, v] for each head in turn",
    "hd2": "rows are k, v for each element in turn",
    "qk2hd": "rows are [q; k]",
    "qkh2d": "rows are [q, k] for each head in turn",
    "qkhd2": "rows are q, k for each element in turn",
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
    if words := words_of(options):
        rows.append(("queries and keys", words, "used as they are projected"))
    if match.reading.own_bias is not None:
        rows.append(("scores", "a bias by position is added", "attn_mask of floats, given in each call"))
    wrap = options.get("wrap", "none")
    rows.append(("includes", WRAP_WORDS.get(wrap, wrap), "attention alone"))
    if options.get("causal") == "yes" and "attend_over" not in match.choices:  # tokens that see no other look causal
        rows.append(("causal mask", "built in", "attn_mask, given in each call"))
    return rows + [row for masks in (examination.masks, *examination.other_masks) for row in _mask_rows(masks)]


def _arguments_words(plan: CallPlan) -> str:
    words = {"input": "query = key = value", "memory": "key = value", "mask?": "mask"}
    words |= {role: role.removeprefix("=") for _, role in plan.roles if role.startswith("=")}
    return ", ".join(
        name if words.get(role, role) == name else f"{name}: {words.get(role, role)}" for name, role in plan.roles
    )


def _projection_rows(examination: AttentionExamination, match: Match) -> list[Row]:
    reading = match.reading.projections
    if reading is None:
        return [("heads", str(match.reading.setting.num_heads), "")]
    names = ", ".join(leaf.name for leaf in reading.leaves)
    packed = reading.layout.removeprefix("qkv").removeprefix("kv")  # "qk..." stays as it is
    detail = f"{names}: {PACKED_WORDS[packed]}" if packed in PACKED_WORDS else f"{names} ({reading.order})"
    if reading.layout != "separate" and reading.order != "qkv":
        detail += f", in the order {', '.join(reading.order)}"
    projections = match.reading.read(examination.subject.function)
    parts = {"q": projections.query, "k": projections.key, "v": projections.value, "out": projections.output}
    biased = [name for name, part in parts.items() if part is not None and part.bias is not None]
    bias = "on all" if len(biased) == len([p for p in parts.values() if p is not None]) else f"on {', '.join(biased)}"
    output = reading.output.name if reading.output is not None else "none: the heads side by side come back"
    return [
        _heads_row(match.reading.setting.num_heads, projections),
        ("projections", detail, "in_proj_weight: rows are [q; k; v]"),
        ("output projection", output, "out_proj"),
        ("biases", bias if biased else "none", "on all, or none"),
    ]


def _heads_row(num_heads: int, projections: Projections) -> Row:
    query, key = projections.query.weight, projections.key.weight
    shared = num_heads if query is None or key is None else key_heads(query.size(0), key.size(0), num_heads)
    if shared == num_heads:
        return ("heads", str(num_heads), "num_heads")
    words = f"{num_heads}; keys and values have {shared}"
    return ("heads", words, "enable_gqa of F.scaled_dot_product_attention")


def _mask_rows(masks: MaskReading) -> list[Row]:
    if masks.form is None or any(m.option == "ignored" for m in masks.mistakes):
        return []
    theirs = "key_padding_mask" if masks.form.pattern == "keys" else "attn_mask"
    return [(f"mask ({masks.parameter or 'mask'})", str(masks.form), f"{theirs}: True = may not look, or added")]


def findings_of(examination: AttentionExamination) -> list[Finding]:
    """Turn the mistakes of a match into findings with their evidence.

    Args:
        examination: With a match.

    Returns:
        One finding for each mistake; empty for correct code.
    """
    if examination.match is None:
        return []
    places = related_sources(examination.subject.function, examination.subject.source)
    match = max(examination.matches, key=lambda m: told_by(m.mistakes, places))
    evidence = "the parameters show it, and the output agrees to rounding"
    findings = [structural_finding(name, evidence, places) for name in match.reading.implied]
    findings += _match_findings(examination, match, places)
    findings += _mask_findings(examination.masks, places)
    for masks in examination.other_masks:
        if not (examination.memory_may_be_given and any(m.option == "ignored" for m in masks.mistakes)):
            findings += [replace(finding, where=masks.parameter) for finding in _mask_findings(masks, places)]
    return findings


def _match_findings(examination: AttentionExamination, match: Match, places: list[Source]) -> list[Finding]:
    error, without, count = confirm(examination, match)
    evidence = (
        f"reproduces your output to {error:.0e} of its largest value on {count} fresh inputs and other weights; "
        f"without it the difference is {without:.2g}"
    )
    findings, others = [], [m for m in examination.matches if m.names != match.names]
    for index, mistake in enumerate(dict.fromkeys(match.mistakes)):
        alternatives = tuple(
            m.mistakes[index].sentence
            for m in others
            if len(m.mistakes) > index and m.mistakes[index].name != mistake.name
        )
        findings.append(_finding(mistake, evidence, places, alternatives))
    return findings


def _mask_findings(masks: MaskReading, places: list[Source]) -> list[Finding]:
    if not masks.mistakes:
        return []
    candidates = sorted(masks.mistakes, key=lambda m: -told_by((m,), places))
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
    return [_finding(first, evidence, places, alternatives)]


def structural_finding(name: str, evidence: str, places: list[Source]) -> Finding:
    """Make a finding of what the structure or the calls show, rather than the numbers."""
    return _finding(STRUCTURE.get(name) or named_mistake(name), evidence, places, ())


def _finding(mistake: Mistake, evidence: str, places: list[Source], alternatives: tuple[str, ...]) -> Finding:
    return Finding(
        mistake.name,
        mistake.slot,
        mistake.sentence,
        mistake.have,
        mistake.want,
        mistake.fix,
        blamed_line(mistake, places),
        on_purpose_in=mistake.choice,
        evidence=evidence,
        alternatives=alternatives,
    )


def guilty_line(patterns: tuple[str, ...], source: Source, file_source: Source) -> tuple[CodeLine, ...]:
    """Give the line that is probably to blame; nothing if none is found."""
    for place in (source, file_source):
        found = place.line_matching(*patterns)
        if found is not None:
            return (CodeLine(Path(place.path).name, *found),)
    return ()


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
    saved = [] if module is None else [(p, p.detach().clone()) for p in module.parameters()]
    for seed, (query_len, key_len) in enumerate(((6, 9), (4, 7), (8, 3), (3, 6)), start=300):
        equal = examination.lengths.query_len == examination.lengths.key_len
        lengths = (query_len, query_len if equal else key_len)
        if examination.lengths.whole:
            lengths = (examination.lengths.query_len, examination.lengths.key_len)
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
    with torch.no_grad():
        for parameter, value in saved:
            parameter.copy_(value)
    return with_mistakes, without, count


def _with(sizes: Sizes, query_len: int, key_len: int) -> Sizes:
    return Sizes(FRESH_BATCH, sizes.num_heads, query_len, key_len, sizes.head_dim)
