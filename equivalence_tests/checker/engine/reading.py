"""How the code was read: how it is called, where its heads and weights are, and what it includes beside attention."""

from collections.abc import Iterator

import torch

from equivalence_tests.checker.engine.contracts.ending import bare, wrap_of
from equivalence_tests.checker.engine.contracts.projecting import output_weight, weight_of
from equivalence_tests.checker.engine.contracts.scores_table import causal_pattern, is_upper_left
from equivalence_tests.checker.engine.judgement import Judgement
from equivalence_tests.checker.engine.situations import Situation, output_codes
from equivalence_tests.checker.reach.calling import CallPlan
from equivalence_tests.checker.reach.state import changed_by_calls
from equivalence_tests.checker.reporting.report import Report

Row = tuple[str, str, str]
AXES = {"b": "batch", "l": "len", "e": "features", "h": "heads", "d": "head_dim", "1": "1"}
OF_IMAGES = {
    "b e l 1": "(batch, features, height, width)",
    "b l 1 e": "(batch, height, width, features)",
    "b 1 1 l 1 e": "(batch, rows and columns of windows, height and width of each, features)",
    "b e l 1 1": "(batch, features, len, height, width)",
}
WRAPS = {
    ("none", False): "attention alone",
    ("residual", False): "+ residual",
    ("post_norm", False): "+ residual, then LayerNorm (post-norm)",
    ("none", True): "+ LayerNorm on the input (pre-norm)",
    ("residual", True): "+ LayerNorm on the input (pre-norm), + residual",
}
LENGTH_FIRST = "(len, batch, features) unless batch_first"


def reading_of(situation: Situation, report: Report) -> Iterator[Row]:
    """List how the code is called and laid out, beside torch's way: (what, in this code, in torch.nn)."""
    yield "arguments", _arguments(situation.plan), "forward(query, key, value, ...)"
    yield "layout", laid_out(situation.plan), LENGTH_FIRST
    judgement = situation.judgement
    if judgement is None or judgement.blocked():
        return
    yield _heads(judgement)
    if situation.subject.module is not None:
        yield from _weights(judgement)
    if any(finding.name == "bias_added" for finding in report.intended):
        yield "scores", "a bias by position is added", "attn_mask of floats, given in each call"
    wrap = _wrap(situation)
    if wrap:
        yield "includes", wrap, "attention alone"
    if is_causal(judgement) and not any(finding.stage == "mask" for finding in report.findings):
        yield "causal mask", "built in", "attn_mask, given in each call"


def laid_out(plan: CallPlan) -> str:
    """Say how tokens are laid out, and what comes back for a query that is one time step."""
    step = f"; the query {in_words(plan.step)}, the output {in_words(plan.returned)}" if plan.step else ""
    return in_words(plan.layout) + step + (f"; keys and values {in_words(plan.beside)}" if plan.beside else "")


def in_words(layout: str) -> str:
    """Name the axes of a layout such as "b h l d"."""
    return OF_IMAGES.get(layout) or f"({', '.join(AXES[axis] for axis in layout.split())})"


def _arguments(plan: CallPlan) -> str:
    words = {"input": "query = key = value", "memory": "key = value", "mask?": "mask"}
    words |= {role: role.removeprefix("=") for _, role in plan.roles if role.startswith("=")}
    pairs = ((name, words.get(role, role)) for name, role in plan.roles)
    return ", ".join(name if said == name else f"{name}: {said}" for name, said in pairs)


def _heads(judgement: Judgement) -> Row:
    heads, keys = counted_heads(judgement)
    if keys == heads:
        return "heads", str(heads), "num_heads"
    return "heads", f"{heads}; keys and values have {keys}", "enable_gqa of F.scaled_dot_product_attention"


def counted_heads(judgement: Judgement) -> tuple[int, int]:
    """Count the heads of the queries, and those of the keys."""
    parts = judgement.attention.parts
    heads = len(torch.cat([part.places_of_heads.unique() for part in parts]).unique())
    return heads, len(torch.cat([part.table.key_heads for part in parts]).unique(dim=0))


def _weights(judgement: Judgement) -> Iterator[Row]:
    """The parameters that make queries, keys and values, and the output."""
    attention = judgement.attention
    operands = judgement.first_operands
    names = {operand.role: module_of(weight_of(attention, operand)) for operand in operands}
    distinct = list(dict.fromkeys(names.values()))
    if any(distinct):
        said = ", ".join(name or "none" for name in distinct) + " (qkv)" * (len(distinct) == 3)
        yield "projections", said, "in_proj_weight: rows are [q; k; v]"
    output = output_weight(attention)
    yield "output projection", module_of(output) or "none: the concatenated heads are returned", "out_proj"


def module_of(parameter: str) -> str:
    """Give the path of the layer that holds a parameter, or the parameter's own where it stands alone.

    >>> module_of("attn.q_proj.weight"), module_of("W_query")
    ('attn.q_proj', 'W_query')
    """
    return parameter.removesuffix(".weight")


def _wrap(situation: Situation) -> str:
    """What stands around the attention; "" where that is not known."""
    judgement, read = situation.judgement, output_codes(situation)
    if judgement is None or read is None:
        return ""
    wrap = wrap_of(judgement.attention, read[1])
    sources = judgement.attention.run.names.sources
    parents = [sources[n] for o in judgement.first_operands[:1] for source in o.sources for n in source.parents]
    normed = any(bare(judgement.attention, parent).kind == "normed" for parent in parents)
    return WRAPS.get((wrap, normed), "")


def is_causal(judgement: Judgement) -> bool:
    """Whether every query sees the keys up to its own place and no other."""
    pairs = zip(judgement.attention.parts, judgement.hidden, strict=False)
    known = [(part, hidden, torch.ones_like(hidden)) for part, hidden in pairs]
    return bool(known) and all(causal_pattern(*one) == "causal" or is_upper_left(*one) for one in known)


def notes_of(situation: Situation) -> Iterator[str]:
    """Say what the code has that torch.nn has not, and what it has not."""
    judgement = situation.judgement
    if judgement is None or judgement.blocked():
        return
    singles = [m.single for m in judgement.models] + [o.single for row in judgement.operands for o in row]
    if any(singles) and situation.subject.dtype == torch.float64:
        yield "a part is computed in float32 whatever the input is"
    if changed := changed_by_calls(situation.subject.function):
        yield f"a call changes {', '.join(changed)}; that was restored each time, so no call affected the next"
    if situation.subject.module is not None and not output_weight(judgement.attention):
        yield "there is no output projection: right where another class holds it (BERT), otherwise it is missing"
