"""Which input and which weight queries, keys and values are made of, and which weights are never used."""

import linecache
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from equivalence_tests.checker.engine.codes import feature_of, sources_in
from equivalence_tests.checker.engine.contracts.changing import JOINS
from equivalence_tests.checker.engine.contracts.departure import Departure
from equivalence_tests.checker.engine.contracts.scores_table import ranks_of
from equivalence_tests.checker.engine.judgement import Operand
from equivalence_tests.checker.engine.names import Attention, Run, Source
from equivalence_tests.checker.engine.products import contraction_of
from equivalence_tests.checker.engine.taking_part import (
    argument_name,
    idle_arguments,
    idle_biases,
    idle_modules,
    matrix_of,
    unused_parameters,
    waiting_parameters,
)
from equivalence_tests.checker.engine.vocabulary import CONTRACTIONS, SOFTMAXES
from equivalence_tests.checker.engine.watching import Operation
from equivalence_tests.checker.mistakes.attention import ORDERS
from equivalence_tests.checker.reach.arguments import ROLES
from equivalence_tests.checker.reporting.lines import assigned_at

IN_A_LIST = re.compile(r"(.*\.)\d+(\.|$)")
# What the weights, the variables and the norms of queries, keys and values are called.
WORDS = (("query", "q", "query|queries"), ("key", "k", "keys?"), ("value", "v", "values?"))
OWN = {
    role: re.compile(
        rf"(^|[._])(w?_?({x}s?|{words})|{x}_?proj|w{x}|to_{x}|{x}_?lin\w*|linear_?{x}\w*|in_proj_{x}|{x}_w)([._]|$)",
        re.IGNORECASE,
    )
    for role, x, words in WORDS
}
SAID = {role: re.compile(rf"^(\w+_)?({x}|{words})(_\w+)?$") for role, x, words in WORDS}
SAID_NORM = {role: re.compile(rf"(^|[._])({role}|{x})_?(layer)?_?norm|norm_({role}|{x})$") for role, x, _ in WORDS}


def projection_departures(
    attention: Attention, operands: list[Operand], roles: Mapping[int, str], module: nn.Module | None
) -> Iterator[Departure]:
    """Check that queries, keys and values are made of the inputs and weights of their roles.

    The role of each input goes by the number of its source; where one tensor has several roles, it has all letters.
    """
    unused = unused_parameters(attention.run, module)
    if len(operands) == 3 and roles:
        yield from _inputs(attention, operands, roles)
    if module is not None:
        by_weights = list(_weights(attention, operands, unused, module))
        yield from by_weights or _norms_exchanged(attention, operands)
        yield from _shared_by_heads(attention, operands)
        yield from _idle_heads(attention, operands, unused)
        yield from _one_head_for_all(attention, module)
        yield from _unprojected(attention, operands, unused)
        yield from _normalised_alike(attention, operands)


def _inputs(attention: Attention, operands: list[Operand], roles: Mapping[int, str]) -> Iterator[Departure]:
    letters, handed_over = "", {letter for each in roles.values() for letter in each}
    for operand, own in zip(operands, "qkv", strict=True):
        made_of = _made_of(attention, operand, beyond=True)
        given = "".join(sorted({letter for source in made_of for letter in roles.get(source.number, "")}))
        if not given:
            return
        letters += own if own in given or own not in handed_over else given[0]
    if letters == "qkv":
        return
    first = _first_in_another_role(operands, letters)
    yield Departure(ORDERS.get(letters, "arguments_rotated"), "project", _made_by(attention, first))


def _first_in_another_role(operands: list[Operand], letters: str) -> Operand:
    """The first of queries, keys and values that is made of what belongs to another role."""
    return next(operand for operand, has in zip(operands, letters, strict=True) if operand.role[0] != has)


def _made_by(attention: Attention, operand: Operand) -> Operation | None:
    made = [source.operation for source in _made_of(attention, operand) if source.operation is not None]
    weighed = [operation for operation in made if operation.name in CONTRACTIONS]
    return next(iter([*weighed, *made]), operand.until)


def _made_of(attention: Attention, operand: Operand, beyond: bool = False) -> list[Source]:
    """The sources of an operand, and those before them as far as the projection, or beyond it."""
    return attention.run.names.made_of((source.number for source in operand.sources), beyond)


# ---------------------------------------------------------------------------------------------- weights
def weight_of(attention: Attention, operand: Operand) -> str:
    """Name the parameter that made an operand; "" if none did."""
    made = (source for source in _made_of(attention, operand) if source.kind == "projection")
    weights = (matrix_of(attention, source.operation)[0] for source in made)
    return next(filter(None, weights), "")


def output_weight(attention: Attention) -> str:
    """Name the parameter of the output projection; "" if there is none."""
    made = (s for s in _projections_of_context(attention) if s.operation is not None)
    return next((name for s in made if (name := matrix_of(attention, s.operation)[0])), "")


def _projections_of_context(attention: Attention) -> Iterator[Source]:
    numbers, live = set(attention.context_sources), attention.run.live()
    for source in attention.run.names.sources.values():
        used = source.operation is not None and source.operation.index in live
        made_of = attention.run.names.made_of(source.parents, beyond=True) if used else []
        if source.kind == "projection" and any(other.number in numbers for other in made_of):
            yield source


def _weights(
    attention: Attention, operands: list[Operand], unused: list[str], module: nn.Module
) -> Iterator[Departure]:
    """Weights, or rows of a packed one, that are used twice, and weights whose name says another role."""
    weights = [weight_of(attention, operand) for operand in operands]
    features = [feature_of(operand.codes).unique() for operand in operands]
    places = [matrix_of(attention, _made_by(attention, operand)) for operand in operands]
    distinct = len(set(weights))
    if not all(weights) or distinct < len(set(places)):  # rows of one packed matrix, cut before they are used
        return
    if distinct == 3:
        yield from _misnamed(attention, operands, dict(zip(OWN, weights, strict=True)))
        return
    unused = [name for name in unused if name.endswith("weight") or "." not in name]
    used = [(weight, own.tolist()) for weight, own in zip(weights, features, strict=True)]
    alike = [place for place, one in enumerate(used) if used.count(one) > 1]
    if len(alike) == 3:
        facts = {"unused": unused, "claim": _held_again(module, weights[0])}
        yield Departure("projection_shared", "project", _made_by(attention, operands[1]), facts)
        return
    made = _made_of(attention, operands[alike[0]]) if alike else []
    rows = 1 + max((int(feature_of(source.codes).max()) for source in made), default=0)
    if alike and (distinct == 2 or len(torch.cat(features).unique()) < rows):
        first, second = alike
        roles = list(OWN)[-(rows // len(features[first])) :]  # of which one matrix holds the rows
        own = roles[int(features[first].min()) * len(roles) // rows]
        if own == operands[second].role if len(roles) > 1 else OWN[operands[second].role].search(weights[first]):
            first, second = second, first
        last = operands[second].sources[0]
        taker = operands[second].until if last.kind == "projection" else last.operation  # a norm of its own
        line = taker if distinct == 1 else _made_by(attention, operands[second])
        name = f"{operands[second].role}_uses_{operands[first].role}_projection"
        yield Departure(name, "project", line, {"unused": unused if distinct == 2 else []})


def _held_again(module: nn.Module, weight: str) -> str:
    """Say that a list holds the module of a weight several times; "" where none does."""
    parts = weight.split(".")
    paths = [".".join(parts[:end]) for end in range(1, len(parts))]
    lists = ((path, owner) for path in paths if isinstance(owner := module.get_submodule(path), nn.ModuleList))
    again = (f"All {len(one)} entries of {path} are the same module." for path, one in lists if len({*one}) == 1)
    return next(again, "")


def _shared_by_heads(attention: Attention, operands: list[Operand]) -> Iterator[Departure]:
    """Weights that project the features of each head on their own, where they should see the whole token."""
    for operand in operands:
        made = next((s.operation for s in operand.sources if s.kind == "projection"), None)
        contraction = contraction_of(made) if made is not None else None
        first = all(attention.run.names.sources[n].kind == "input" for s in operand.sources for n in s.parents)
        columns = 0 if contraction is None else len(contraction.right[:, :, 0].unique())
        if first and 0 < columns <= int(feature_of(operand.codes).max()):
            yield Departure("projection_shared_by_heads", "project", made)
            return


def _idle_heads(attention: Attention, operands: list[Operand], unused: list[str]) -> Iterator[Departure]:
    """Heads that are modules of a list, of which some are never called though their place is taken."""
    used = {any_number(weight_of(attention, operand)) for operand in operands}
    idle = [name for name in unused if any_number(name) in used]
    if idle and len(attention.parts) > 1:
        yield Departure("heads_missing_or_repeated", "merge", attention.parts[1].product.operation, {"unused": idle})


def _one_head_for_all(attention: Attention, module: nn.Module) -> Iterator[Departure]:
    """Heads that are modules of a list, of which two are one and the same."""
    first, *others = (part.product.operation for part in attention.parts)
    heads = list(module.get_submodule(first.place.rpartition(".")[0])._modules.values())
    shared = bool(first.place) and len({*map(id, heads)}) == 1 < len(heads)
    if others and shared and all(torch.equal(x.outputs[0].value, first.outputs[0].value) for x in others):
        claim = f"The scores of {len(attention.parts)} heads are the same, bit for bit, for any input."
        yield Departure("one_head_for_all", "project", first, {"claim": claim}, frames=assigned_at(module, first.place))


def any_number(path: str) -> str:
    """Give what the names of one thing in all modules, or parameters, of a list have in common.

    >>> any_number("heads.2.key.weight"), any_number("wq.0")
    ('heads.*.key.weight', 'wq.*')
    """
    return re.sub(r"\.\d+(?=\.|$)", ".*", path)


def _misnamed(attention: Attention, operands: list[Operand], weights: Mapping[str, str]) -> Iterator[Departure]:
    """Weights whose names all say a role, but not the one that they have."""
    said = {role: [r for r, pattern in OWN.items() if pattern.search(weights[role])] for role in weights}
    if not all(len(found) == 1 for found in said.values()):
        return
    letters = "".join(said[role][0][0] for role in ROLES)
    if letters != "qkv" and len(set(letters)) == 3:
        first = _first_in_another_role(operands, letters)
        line = _made_by(attention, first)
        if line is not None and _says_its_weight(line, weights[first.role]):
            steps = (operation for operation, _, _ in first.steps(attention.run))
            taken = (operation for operation in steps if SAID[first.role].search(_assigned(operation)))
            line = next(taken, attention.parts[0].product.operation)
        yield Departure(ORDERS[letters], "project", line)


def _norms_exchanged(attention: Attention, operands: list[Operand]) -> Iterator[Departure]:
    """Norms of queries and keys that are named after each other's role, where one packed matrix made both."""
    names, said = attention.run.names, list[set[str]]()
    for operand in operands[:2]:
        made = (s.operation for s in _made_of(attention, operand) if s.kind in ("normed", "gain"))
        beside = [bits for norm in made if norm is not None for _, bits in names.beside(norm)]
        owners = (name.partition(":")[2] for bits in beside for name in attention.run.recorder.named(bits))
        stems = [owner.rpartition(".")[0] for owner in owners]
        said.append({role for role in ("query", "key") for stem in stems if SAID_NORM[role].search(stem)})
    if said == [{"key"}, {"query"}]:
        yield Departure("query_key_swapped", "project", attention.first)


def _says_its_weight(operation: Operation, weight: str) -> bool:
    """Whether the user's line assigns what a weight makes to a name of the same role: the exchange comes later."""
    named = _assigned(operation)
    return any(pattern.search(weight) and SAID[role].search(named) for role, pattern in OWN.items())


def _assigned(operation: Operation) -> str:
    """The name that the user's innermost line with an assignment gives to what an operation makes; "" for none."""
    lines = (linecache.getline(frame[0], frame[1]).partition(" = ") for frame in operation.frames)
    return next((target.strip().rpartition(".")[2] for target, equals, _ in lines if equals), "")


def _unprojected(attention: Attention, operands: list[Operand], unused: list[str]) -> Iterator[Departure]:
    """Inputs that go into a product without a projection, while a weight is unused."""
    idle = [name for name in unused if "norm" not in name.lower() and not name.endswith("bias")]
    bare = [operand for operand in operands if all(source.kind in ("input", "given") for source in operand.sources)]
    if not idle or len(bare) == 3:
        return
    for operand in bare[:1]:
        numbers = (source.number for source in operand.sources)
        carried = attention.run.names.carrying(numbers, before=operand.until.index)
        first = next((operation for operation, _, _ in carried), operand.until)
        name = f"{operand.role}_not_projected"
        if len(bare) == 2:
            left = next(o.role for o in operands if o not in bare)
            name = f"only_{left}_projected" if left != "key" else name
        yield Departure(name, "project", first, {"unused": idle})


def _normalised_alike(attention: Attention, operands: list[Operand]) -> Iterator[Departure]:
    """Queries, keys and values of one tensor, of which some are made from it normalised and some are not."""
    if operands[0].codes.size(1) != operands[1].codes.size(1):
        return  # what makes fewer keys of the tokens may normalise what it makes
    names = attention.run.names
    inputs, given, before = [], set[int](), set[frozenset[int]]()
    for operand in operands:
        made_of = _made_of(attention, operand, beyond=True)
        given |= {source.number for source in made_of if not source.parents}
        projected = [source for source in _made_of(attention, operand) if source.kind == "projection"]
        parents = [names.sources[n] for source in projected or operand.sources for n in source.parents]
        inputs.append({parent.kind in ("normed", "gain") for parent in parents})
        behind = names.made_of((parent.number for parent in parents), beyond=True)
        before.add(frozenset(source.number for source in behind if source.kind == "projection"))
    if len(given) != 1 or len(before) != 1 or any(len(found) != 1 for found in inputs):
        return
    query, key, value = (found == {True} for found in inputs)
    if query == key == value:
        return
    name = "queries_not_normalised" if not query else "keys_not_normalised"
    yield Departure(name, "project", _made_by(attention, operands[0 if not query else 1]))


def unused_departures(attention: Attention, module: nn.Module | None, found: list[Departure]) -> Iterator[Departure]:
    """Weights that have no effect: biases, output projections, norms; those without a line are reported as one.

    What one of the departures so far leaves unused is not reported again.
    """
    missed = list(_unused(attention, module, found)) if module is not None else []
    norms = [one.facts["norms"] for one in missed if one.name == "norm_never_used" and one.operation is None]
    for one in missed:
        if one.facts.get("norms") in norms[:1]:
            yield replace(one, facts={**one.facts, "norms": ", ".join(norms)})
        elif one.facts.get("norms") not in norms[1:]:
            yield one


def _unused(attention: Attention, module: nn.Module, found: list[Departure]) -> Iterator[Departure]:
    """The same, each weight by itself."""
    explained = {name for departure in found for name in departure.facts.get("unused", ())}
    stems = {name.rpartition(".")[0] for name in explained}
    idle, seen = unused_parameters(attention.run, module), list[Operation | None]()
    waiting, parts = waiting_parameters(attention.run, module), idle_modules(attention.run, module)
    for name in (name for name in idle if name not in waiting and not _of_a_later_token(name, idle, attention, module)):
        stem, worked = name.rpartition(".")[0], _worked_in_vain(attention, name, parts)
        unreached = worked is None and stem.rpartition(".")[0] in parts
        if name in explained or (stem and stem in stems) or unreached or worked in seen:
            continue
        for departure in _missed(attention, module, name, worked):
            yield departure
            if departure.name == "output_projection_skipped":
                stems.add(stem)
            elif departure.operation is worked is not None:
                seen.append(worked)


def _of_a_later_token(name: str, idle: Collection[str], attention: Attention, module: nn.Module) -> bool:
    """Whether each token has a weight of its own, in a list of which as many take part as there are tokens."""
    found = IN_A_LIST.match(name)
    if found is None:
        return False
    beside = (one for one, _ in module.named_parameters() if one.startswith(found[1]) and one not in idle)
    taken = {one.removeprefix(found[1]).partition(".")[0] for one in beside}
    return any(taken == {*map(str, range(count))} for count in ranks_of(attention.parts[0])[2:])


def idle_departures(attention: Attention, function: Callable[..., Any]) -> Iterator[Departure]:
    """Biases of the scores, and arguments, that have no effect on the output."""
    biases = [(argument_name(known, function), x) for known, x in idle_biases(attention)]
    for name, x in (*biases, *idle_arguments(attention.run, function)):
        kind, facts = "bias" if "bias" in name or biases else "argument", {"unused": [name], "parameter": name}
        yield Departure(f"{kind}_never_used", "project", _could_take(attention, x), facts)


def _missed(attention: Attention, module: nn.Module, name: str, worked: Operation | None) -> Iterator[Departure]:
    """Name the mistake that leaves a parameter unused, with the operation that should use it."""
    stem, _, last = name.rpartition(".")
    kind, facts = "bias" if "bias" in name else "weight", {"unused": [name], "parameter": name}
    beside = _taking(attention.run, name.removesuffix("bias") + "weight") if last.endswith("bias") else []
    user = next((op for op in beside if op.name in CONTRACTIONS), None)
    parameter = dict(module.named_parameters())[name]
    if user is not None:
        yield Departure("bias_never_used", "project", user, facts)
    elif "norm" in name.lower() or (stem and isinstance(module.get_submodule(stem), nn.LayerNorm | nn.RMSNorm)):
        if last == "weight":
            yield _norm_never_used(attention, name)
    elif worked is not None:
        yield Departure(f"{kind}_never_used", "project", worked, facts)
    elif last == "weight" or not stem:
        if parameter.dim() >= 2 and kind == "weight" and not any(_projections_of_context(attention)):
            named = any(said.search(stem.rpartition(".")[2]) for said in SAID.values())  # for another branch
            skipped = Departure("output_projection_skipped", "output", attention.end, facts)
            yield Departure("weight_never_used", "project", None, facts) if named else skipped
        elif f"{attention.first.place}.".startswith(f"{stem}." if stem else ""):
            yield Departure(f"{kind}_never_used", "project", _could_take(attention, parameter), facts)


def _could_take(attention: Attention, idle: Tensor) -> Operation:
    """The operation that could take an unused tensor: the product of queries and keys, one after it, or the softmax."""
    part = attention.parts[0]
    if idle.numel() in (part.product.left.size(-1), part.product.left.size(-1) * len(part.table.heads)):
        return part.product.operation
    wanted = SOFTMAXES | JOINS if idle.dim() > 1 else SOFTMAXES
    return next((op for op, _, _ in part.steps(attention.run) if op.name in wanted), part.product.operation)


def _worked_in_vain(attention: Attention, parameter: str, idle: set[str]) -> Operation | None:
    """The operation that could have taken what was made from a parameter, though none did; None if nothing was made.

    In a module without any other effect, its own last operation.
    """
    run, live = attention.run, attention.run.live()
    made = [op for op in _taking(run, parameter) if op.index not in live]
    later = (op for op in run.operations if made and op.index > made[-1].index and op.index in live)
    taking = next((op for op in later if run.names.taken(op)), None)
    if taking is None or made[-1].place not in idle:
        return taking
    return [op for op in run.operations if op.place == made[-1].place][-1]


def _norm_never_used(attention: Attention, weight: str) -> Departure:
    """A norm that is not used; one named after queries or keys is missing after their projection."""
    part, names = attention.parts[0], attention.run.names
    facts = {"unused": [weight], "norms": weight.removesuffix(".weight")}
    role = next((role for role in ("query", "key") if SAID_NORM[role].search(weight.rpartition(".")[0])), "")
    if not role:
        return Departure("norm_never_used", "wrap", None, facts)
    sources = (names.sources[number] for number in sources_in(part.sides[role][0]))
    made = next((source.operation for source in sources if source.operation is not None), None)
    return Departure("norm_never_used", "wrap", made, facts)


def _taking(run: Run, parameter: str) -> list[Operation]:
    """The operations that take what is made of a parameter."""
    bit = sum(1 << i for i, name in enumerate(run.recorder.names) if name == f"param:{parameter}")
    return [op for op in run.operations if any(bits & bit for bits in op.origins)]
