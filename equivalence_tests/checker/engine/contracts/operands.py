"""What happens to queries, keys and values between their projection and their product.

Equal, or equal up to a factor, is right. Queries and keys may also be rotated by their positions, alike, or normalised;
that is found by experiments: the recorded operations between are run again on inputs of our own.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from equivalence_tests.checker.engine.codes import looked_up, source_of, sources_in, token_of
from equivalence_tests.checker.engine.contracts.changing import USUAL, first_change, is_strange, strange_operations
from equivalence_tests.checker.engine.contracts.departure import Departure, changed_by
from equivalence_tests.checker.engine.contracts.scores_table import sum_in
from equivalence_tests.checker.engine.judgement import Operand, RotaryPairs
from equivalence_tests.checker.engine.names import Attention, Part, Run, Source, values_at
from equivalence_tests.checker.engine.replaying import replayed
from equivalence_tests.checker.engine.same import EXACT, LOOSE, MEASURED, ROUNDING, TABLE, constant_ratio, near
from equivalence_tests.checker.engine.vocabulary import ADDS
from equivalence_tests.checker.engine.watching import Operation, Recorder, Slot

# The kinds of sources that queries, keys or values are made into from another one.
MADE = ("normed", "gain", "added", "gated", "pooled", "projection")
UNCLEAR = 0.15  # a share of the steps that is nearer to a half says nothing


def read_operands(attention: Attention, part: Part) -> list[Operand]:
    """Find out how queries, keys and values came from their projections."""
    run, product = attention.run, part.product
    (left, right), contraction = product.operands, product.contraction
    query = _operand(run, "query", left, product.left, contraction.left, product.operation)
    key = _operand(run, "key", right, product.right, contraction.right, product.operation)
    averaged = ((c, c.contraction.right.mT) for c in part.contexts[:1])
    return [query, key, *(_operand(run, "value", c.operands[1], c.values.mT, at, c.operation) for c, at in averaged)]


def _operand(run: Run, role: str, slot: Slot, codes: Tensor, places: Tensor, until: Operation) -> Operand:
    codes, places = _followed(run, codes, places)
    numbers = sources_in(codes)
    operand = Operand(role, [run.names.sources[n] for n in numbers], slot, codes, places, until)
    carrying = run.names.carrying(numbers, before=until.index + 1)
    dtypes = {s.value.dtype for op, _, _ in carrying for s in (*op.outputs, *op.inputs)}
    halves = dtypes & {torch.bfloat16, torch.float16}
    operand.single = bool(halves) or torch.float32 in dtypes
    operand.tolerance = 5e-4 if halves else TABLE if operand.single else ROUNDING
    want = values_at(operand.sources, codes)
    have = slot.value.double().reshape(-1)[places]
    missing = want.isnan()
    ratio = constant_ratio(have[~missing], want[~missing], TABLE if operand.single else ROUNDING)
    if ratio is not None:
        operand.factor = ratio
        return operand
    if bool((~missing).any()):
        operand.change = "other"
        _experiment(run, operand)
    return operand


def _followed(run: Run, codes: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
    """Names and places of the rows that come from somewhere, beside others that are named where they are used."""
    given = [n for n in sources_in(codes) if run.names.sources[n].kind == "given"]
    rows = ~torch.isin(source_of(codes), torch.tensor(given)).any(-1)
    return (codes[rows][None], places[rows][None]) if bool(rows.any()) and not bool(rows.all()) else (codes, places)


def _drawn(operand: Operand, seed: int) -> dict[int, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    slots = [source.slot for source in operand.sources]
    drawn = [3 * torch.randn(slot.value.shape, generator=generator, dtype=torch.float64) for slot in slots]
    return {slot.key: numbers.to(slot.value.dtype) for slot, numbers in zip(slots, drawn, strict=True)}


def _rows(run: Run, operand: Operand, given: dict[int, Tensor]) -> tuple[Tensor, Tensor]:
    """Rows of the operand for other numbers at the projections, with those numbers."""
    value = replayed(run.recorder, given, operand.start, operand.slot, operand.until.index - 1)
    have = (operand.slot.value if value is None else value).double().reshape(-1)[operand.places]
    return have, values_at(operand.sources, operand.codes, [given[source.slot.key] for source in operand.sources])


def _experiment(run: Run, operand: Operand) -> None:
    """Tell rotations and norms from anything else."""
    one, two = _drawn(operand, 1), _drawn(operand, 2)
    try:
        (have1, want1), (have2, want2) = _rows(run, operand, one), _rows(run, operand, two)
        both = {key: one[key] + two[key] for key in one}
        have3, _ = _rows(run, operand, both)
        tenfold, _ = _rows(run, operand, {key: 10 * value for key, value in one.items()})
    except (RuntimeError, TypeError, ValueError):
        return
    tolerance = max(operand.tolerance, EXACT)
    if near(have3, have1 + have2, tolerance) and near(tenfold, 10 * have1, tolerance):
        ratio = constant_ratio(have1.norm(dim=-1), want1.norm(dim=-1), tolerance)
        again = constant_ratio(have2.norm(dim=-1), want2.norm(dim=-1), tolerance)
        rows, others = (have.norm(dim=-1) / want.norm(dim=-1) for have, want in ((have1, want1), (have2, want2)))
        only_rotated = ratio is not None or not near(rows, others, tolerance)  # else each row has a factor of its own
        operand.pairs = _rotary_pairs(run, operand) if only_rotated else None
        if ratio is not None and again is not None and abs(ratio - again) <= tolerance * abs(ratio):
            own = abs(ratio - 1) > MEASURED  # else the table of angles was rounded before it was widened
            operand.change, operand.factor = "rotated", ratio if own else 1.0
        operand.across = ratio is None and _keeps_tokens(operand, have1, want1) and _keeps_tokens(operand, have2, want2)
    elif near(tenfold, have1, 2e-2) and _in_one_plane(have3, have1, have2):
        operand.change = "normed"
        operand.factor = 1.0 if operand.role == "value" else _factor_behind_norm(run, operand)
        along = (have1 * want1).sum(-1).abs() / have1.norm(dim=-1) / want1.norm(dim=-1)
        operand.pairs = _rotary_pairs(run, operand) if not near(along, torch.ones_like(along), LOOSE) else None


def _factor_behind_norm(run: Run, operand: Operand) -> float:
    """What multiplies an operand behind the part that normalises it."""
    factor, normed = 1.0, False
    for operation, codes, value in operand.steps(run):
        inside, taken = operation.place != operand.until.place, operation.inputs[0].value
        whole = value.shape == taken.shape and bool(torch.isin(operand.codes, codes).all())  # no half of a rotation
        ratio = constant_ratio(value, taken, operand.tolerance) if whole else None
        factor, normed = (1.0 if inside else factor * (ratio or 1.0)), normed or inside
    return factor if normed else 1.0


def _keeps_tokens(operand: Operand, have: Tensor, want: Tensor) -> bool:
    """Whether the rows of all heads of a token are together as long as they were, though no single one is."""
    token = token_of(operand.codes)[..., 0].reshape(-1)
    long, longer = (sum_in(x.square().sum(-1).reshape(-1), token) for x in (want, have))
    return len(token.unique()) < len(token) and near(longer, long, max(operand.tolerance, MEASURED))


def _in_one_plane(both: Tensor, one: Tensor, two: Tensor) -> bool:
    """Whether the row of a sum is a sum of multiples of the two rows: what is normalised keeps its direction."""
    table = torch.stack([one, two], -1)
    found = torch.linalg.lstsq(table, both[..., None]).solution
    return near((table @ found)[..., 0], both, 2e-2)


def _rotary_pairs(run: Run, operand: Operand) -> RotaryPairs | None:
    """Find the pairs by following one element at a time: a rotation gives a share of it to exactly one other."""
    for place in range(operand.codes.size(-1)):
        have = _shares_of(run, operand, [place])
        others = [i for i in (have.abs() > MEASURED).any(0).nonzero().flatten().tolist() if i != place]
        if len(others) > 1:
            return None
        if others:
            return RotaryPairs(place, others[0] - place)
    return None


def _shares_of(run: Run, operand: Operand, places: list[int]) -> Tensor:
    """Rows of an operand where some elements of each token are one and the others are nothing."""
    own = operand.codes[..., places].contiguous()
    given = {s.slot.key: torch.isin(s.codes.contiguous(), own).to(s.slot.value.dtype) for s in operand.sources}
    return _rows(run, operand, given)[0].reshape(-1, operand.codes.size(-1))


def _angles(run: Run, operand: Operand, pairs: RotaryPairs) -> Tensor:
    """By which angle each pair of each row is rotated, (slices, rows, pairs)."""
    first = pairs.first(operand.codes.size(-1))
    have = _shares_of(run, operand, first)
    angles = torch.atan2(have[:, [place + pairs.apart for place in first]], have[:, first])
    return angles.view(*operand.codes.shape[:-1], -1)


def _steps(angles: Tensor, dim: int) -> Tensor:
    """By how much angles grow from one token to the next, at most half a turn."""
    return torch.remainder(angles.diff(dim=dim) + torch.pi, 2 * torch.pi) - torch.pi


def turns_of(run: Run, operand: Operand) -> Tensor:
    """By how much each pair turns from one token to the next; NaN where that differs, none where rows are no tokens."""
    rows = token_of(operand.codes)[..., 0]
    if operand.pairs is None or operand.codes.size(1) < 2 or not bool((rows.diff(dim=1) == 1).all()):
        return torch.zeros(0)
    steps = _steps(_angles(run, operand, operand.pairs), 1).abs().flatten(0, 1)
    even = (steps - steps.mean(0)).abs().amax(0) < LOOSE
    return torch.where(even, steps.mean(0), torch.nan)


def _rotated_backwards(run: Run, operand: Operand) -> bool:
    """Whether all pairs whose direction is clear are rotated backwards; learnt angles go either way."""
    if operand.pairs is None:
        return False
    steps = _steps(_angles(run, operand, operand.pairs), 1).flatten(0, 1)
    moved = steps.abs() > EXACT
    rising = ((steps > 0) & moved).sum(0) / moved.sum(0)  # the share of the steps; NaN where a pair never moves
    clear = rising[(rising - 0.5).abs() > UNCLEAR]
    return bool(len(clear)) and bool((clear < 0.5).all())


def operand_departures(attention: Attention, part: Part, operands: list[Operand]) -> Iterator[Departure]:
    """Name what changes an operand and is neither a factor, a rotation nor a norm."""
    for operand in operands:
        for step in _stretches(attention, operand):
            scaled = operand.role == "value" and (step.change or abs(step.factor - 1) > MEASURED)
            departure = _located(attention, step) if step.change == "other" or scaled else None
            bent = _bent_angles(attention.run, step) if step.pairs is not None else None
            if bent is not None:
                yield bent
            elif departure is not None and (step is operand or _is_own(attention, departure)):
                yield _behind_rotation(attention.run, step) or _named(attention.run, departure, step)
    query, key = operands[0], operands[1]
    both = query.rotated and key.rotated
    if both and not _rotated_alike(attention.run, query, key):
        backwards = _rotated_backwards(attention.run, key) and not _rotated_backwards(attention.run, query)
        yield Departure("rotations_differ", "rotary", _last_sum(attention.run, key if backwards else query))
    if both and all(_rotated_without_positions(attention.run, operand) for operand in (query, key)):
        yield Departure("rotary_without_positions", "rotary", _last_sum(attention.run, query))
    elif {query.change, key.change} == {"rotated", ""}:
        name = "rotary_queries" if query.change else "rotary_keys"
        rotated = query if query.change else key
        yield Departure(name, "rotary", _first_change(attention.run, rotated))
    elif both and all(_rotated_backwards(attention.run, o) for o in (query, key)):
        total = _last_sum(attention.run, query)
        subtracts = total is not None and total.name == "sub"
        yield Departure("rotary_reversed", "rotary", total if subtracts else _first_change(attention.run, query))


def _behind_rotation(run: Run, operand: Operand) -> Departure | None:
    """What changes an operand after it was rotated; None if it never was a rotation, or is one to the end."""
    steps = [*operand.steps(run)] if operand.change == "other" else []
    for place in range(len(steps) - 2, -1, -1):
        operation, codes, _ = steps[place]
        if operation.name in ADDS and (rotated := _as_given_by(run, operand, operation, codes)) is not None:
            later = steps[place + 1 :]
            whole = [(one, codes) for one, codes, _ in later if len(one.outputs) == 1]  # no piece of many
            patches = {end.index: partial(_from_rotation, rotated, codes) for end, codes in whole[-1:]}
            changed = (one for one, codes, value in later if not _is_as_rotated(rotated, codes, value))
            return changed_by(next(changed, later[0][0]), "operand", operand.role, patches=patches)
    return None


def _as_given_by(run: Run, operand: Operand, operation: Operation, codes: Tensor) -> Operand | None:
    """An operand as an operation on its way gives it, if it is rotated there and no more."""
    given, places = codes.flatten().sort()
    found = torch.searchsorted(given, operand.codes.contiguous()).clamp(max=len(given) - 1)
    if not torch.equal(given[found], operand.codes):
        return None
    after, slot = run.operations[operation.index + 1], operation.outputs[0]
    rotated = replace(operand, slot=slot, places=places[found], until=after, pairs=None, across=False)
    _experiment(run, rotated)
    return rotated if rotated.change == "rotated" else None


def _from_rotation(rotated: Operand, codes: Tensor, recorder: Recorder, operation: Operation) -> Tensor:
    """Take the numbers as the rotation gave them in this run."""
    want = _rotated(rotated, codes, recorder.operations[rotated.until.index - 1].outputs[0].value)
    return torch.where(want.isnan(), operation.outputs[0].value.double(), want)


def _is_as_rotated(rotated: Operand, codes: Tensor, value: Tensor) -> bool:
    """Whether the numbers under some names are those that the rotation gave."""
    want = _rotated(rotated, codes, rotated.slot.value)
    return near(value.double()[~want.isnan()], want[~want.isnan()], rotated.tolerance)


def _rotated(rotated: Operand, codes: Tensor, made: Tensor) -> Tensor:
    """The numbers that a rotation made, under other names; NaN where it made none."""
    return looked_up(codes, rotated.codes.flatten(), made.double().flatten()[rotated.places].flatten())


def _is_own(attention: Attention, departure: Departure) -> bool:
    """Whether a change on an earlier stretch is known nowhere, or stands in the attention and is no network's bend."""
    operation = departure.operation
    if operation is None or operation.place != attention.first.place:
        return operation is not None and is_strange(operation)
    adds_two = operation.name == "add" and len(operation.inputs) > 1  # a residual, or a position
    return departure.facts["function"] not in USUAL and not adds_two


def _named(run: Run, departure: Departure, operand: Operand) -> Departure:
    """A rotation that is none, or one of the values, has a name."""
    if not operand.across and operand.pairs is None:
        return departure
    wrong = "rotary_across_heads" if operand.across else "rotary_mixed"
    operation = (_last_sum(run, operand) if operand.across else None) or departure.operation
    return Departure("rotary_values" if operand.role == "value" else wrong, "rotary", operation, {}, departure.patches)


def _bent_angles(run: Run, operand: Operand) -> Departure | None:
    """Name what is done to the angles of an operand's rotation that no known model does."""
    mixed = operand.change == "other"  # as where a sine is multiplied and its cosine is not
    for operation, _, _ in operand.steps(run):
        for slot, _ in run.names.beside(operation):
            for bent in strange_operations(run, slot, operation.index, mixed):
                return changed_by(bent, "rotary", operand.role)
    return None


def earlier(run: Run, operand: Operand, source: Source, through: tuple[str, ...]) -> Operand | None:
    """Give what one source of an operand was made of, where it is of these kinds."""
    if source.operation is None or source.kind not in through:
        return None
    for slot, codes in run.names.taken(source.operation):
        if not set(source.parents).isdisjoint(sources_in(codes)):
            rows = torch.arange(codes.numel()).view(1, -1, codes.size(-1))
            return _operand(run, operand.role, slot, codes.reshape(rows.shape), rows, source.operation)
    return None


def _stretches(attention: Attention, operand: Operand) -> Iterator[Operand]:
    """An operand from what named it last to its product, and each stretch before, in the module of the attention."""
    place, left = attention.first.place, [operand]
    while left:
        step = left.pop()
        yield step
        for before in (earlier(attention.run, step, source, MADE) for source in step.sources):
            made = [source.operation for source in before.sources if source.kind in MADE] if before else []
            inside = all(operation is not None and operation.place.startswith(place) for operation in made)
            if before and inside and len(made) == len(before.sources):  # unlike what another head averaged
                left.append(before)


def _rotated_alike(run: Run, query: Operand, key: Operand) -> bool:
    """Whether a query and a key at one position are rotated by the same angles."""
    tokens, others = (token_of(operand.codes)[..., 0] for operand in (query, key))
    if query.codes.size(0) != key.codes.size(0) or query.codes.size(-1) != key.codes.size(-1):
        return True
    beside = tokens[:, :, None] == others[:, None, :]  # keys of other tokens may stand among them
    if query.pairs is None or key.pairs is None or not bool((beside.sum(-1) == 1).all()):
        return True
    if query.pairs != key.pairs:
        return False
    own, its = (_angles(run, one, query.pairs) for one in (query, key))
    apart = own - torch.einsum("nij,njp->nip", beside.to(its.dtype), its)
    return bool((apart.sin().abs() + 1 - apart.cos() < max(query.tolerance, MEASURED)).all())


def _rotated_without_positions(run: Run, operand: Operand) -> bool:
    """Whether all tokens are rotated by the same angles, though no argument gives the angles."""
    made = (bits for operation, _, _ in operand.steps(run) for _, bits in run.names.beside(operation))
    given = any(name.startswith("arg:") for bits in made for name in run.recorder.named(bits))
    several = bool((token_of(operand.codes)[..., 0].diff(dim=1) != 0).any())
    if operand.pairs is None or given or not several:
        return False
    return bool((_steps(_angles(run, operand, operand.pairs), 1).abs() < MEASURED).all())


def _last_sum(run: Run, operand: Operand) -> Operation | None:
    """The last addition of a rotation: cos times the elements plus sin times their partners."""
    own = (op for op, codes, _ in operand.steps(run) if bool(torch.isin(codes, operand.codes).any()))
    sums = [op for op in own if op.name in ADDS]
    return sums[-1] if sums else _first_change(run, operand)


def _first_change(run: Run, operand: Operand) -> Operation | None:
    return first_change(operand.sources, operand.steps(run))


def _located(attention: Attention, operand: Operand) -> Departure:
    """The first operation after the last one that is still right."""
    run = attention.run
    steps: list[tuple[Operation, Tensor, Tensor, bool]] = []
    for operation, codes, value in operand.steps(run):
        want = values_at(operand.sources, codes)
        mine = ~want.isnan() & torch.isin(codes, operand.codes)
        if bool(mine.any()):
            ratio = constant_ratio(value.double()[mine], want[mine], operand.tolerance)
            good = ratio is not None and (operand.role != "value" or abs(ratio - 1) <= MEASURED)
            steps.append((operation, codes, want, good))
    last = min((_last_good(steps, source) for source in operand.sources), default=-1)
    guilty = steps[min(last + 1, len(steps) - 1)] if steps else None
    bent = next((step for step in steps[last + 1 :] if not _is_linear(run, operand, step[0])), None)
    known_nowhere = [*strange_operations(run, operand.slot, operand.until.index)]
    strange = next((step for step in steps if step[0] in known_nowhere), None)
    guilty = strange or bent or guilty
    if guilty is None:
        return changed_by(operand.until, "operand", operand.role)
    end, end_codes, end_want, _ = steps[-1]
    whole = not bool(end_want.isnan().any()) and len(end.outputs) == 1
    patches = {end.index: partial(_from_source, run, end_codes)} if whole else {}
    return changed_by(guilty[0], "operand", operand.role, patches=patches)


def _last_good(steps: list[tuple[Operation, Tensor, Tensor, bool]], source: Source) -> int:
    """The last step before the first one after which a source's own numbers are wrong for good."""
    own = [i for i, step in enumerate(steps) if source.number in sources_in(step[1])]
    good = max((place for place, i in enumerate(own) if steps[i][3]), default=-1)
    return own[good + 1] - 1 if good + 1 < len(own) else len(steps) - 1


def _is_linear(run: Run, operand: Operand, operation: Operation) -> bool:
    """Whether what an operation gives is linear in what was projected: factors, rotations, sums."""
    one, two = _drawn(operand, 1), _drawn(operand, 2)
    both, neither = {key: one[key] + two[key] for key in one}, {key: 0 * one[key] for key in one}
    slot, until = operation.outputs[0], operation.index
    given = [replayed(run.recorder, drawn, operand.start, slot, until) for drawn in (one, two, both, neither)]
    if any(value is None for value in given):
        return True
    first, second, together, nothing = (value.double() for value in given if value is not None)
    return near(together, first + second - nothing, max(operand.tolerance, EXACT))


def _from_source(run: Run, codes: Tensor, recorder: Recorder, operation: Operation) -> Tensor:
    """Take the numbers as the projection gave them in this run, or as they were handed over in it."""
    sources = [run.names.sources[x] for x in sources_in(codes)]
    return values_at(sources, codes, [_made_in(recorder, run, source) for source in sources])


def _made_in(recorder: Recorder, run: Run, source: Source) -> Tensor:
    """The numbers of a source of one run in another one."""
    if source.operation is not None:
        return recorder.operations[source.operation.index].outputs[0].value
    given = [place for place, slot in enumerate(run.recorder.given) if slot.tensor is source.slot.tensor]
    return recorder.given[given[-1]].value if given else source.slot.value
