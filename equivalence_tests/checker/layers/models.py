"""Run a whole model: are its layers chained, does the decoder read the encoder, does the order of tokens matter?"""

import ast
import inspect
import itertools
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from equivalence_tests.checker.engine.names import Run
from equivalence_tests.checker.engine.probing import causal_claim
from equivalence_tests.checker.engine.ran import frames_where
from equivalence_tests.checker.engine.same import identical
from equivalence_tests.checker.engine.taking_part import OF_MASKS
from equivalence_tests.checker.engine.watching import ModuleCall, storage_of
from equivalence_tests.checker.layers.decoding import add_decoding
from equivalence_tests.checker.layers.masks import (
    PADDING,
    hides_later_steps,
    line_that_sets,
    looks_ahead,
    makes_where_missing,
    padding_not_run,
)
from equivalence_tests.checker.layers.walk import Walk, is_inside, layers_of, mark_of, masks_of, outermost, recorded
from equivalence_tests.checker.layers.whole_beside import COMPARES
from equivalence_tests.checker.mistakes import named_mistake
from equivalence_tests.checker.parts.kinds import atoms_of, is_torchs
from equivalence_tests.checker.parts.names import kind_of_name
from equivalence_tests.checker.reach.arguments import role_of_parameter
from equivalence_tests.checker.reach.errors import CannotCheckError
from equivalence_tests.checker.reach.model_calls import AIM, DECODES, TARGET, ModelRun, taken_by_losses
from equivalence_tests.checker.reach.proposing import nodes_of, parameters_of, unread_arguments
from equivalence_tests.checker.reach.state import switch_off
from equivalence_tests.checker.reach.syntax import function_at
from equivalence_tests.checker.reach.tracing import tensors_in
from equivalence_tests.checker.reporting.findings import Exercise
from equivalence_tests.checker.reporting.lines import Frames, assigned_at, is_users, source_of

Row = tuple[str, str, str]  # what was looked at, the mistake or "", and where
Stack = tuple[str, list[nn.Module]]
WHOLE_MODEL = "the whole model"
TORCHS = re.compile(r"MultiheadAttention|Transformer((En|De)coder(Layer)?)?")
POSITIONS = re.compile(r"(?<![a-z])pos|position|sinusoid|(?<![a-z])w?pe(?![a-z])", re.IGNORECASE)
OF_OTHERS, OF_ANOTHER = "mask_hides_other_entries", "outputs_of_other_tokens"
SEES_ALL = "every token sees those after it: right where hidden tokens are predicted, wrong where the next one is"
# Names of models of tokens that predict the next one, and of those that read both ways whatever else they are called.
GENERATES = re.compile(r"gpt|llama|decoder|language|causal|lm$|sasrec", re.IGNORECASE)
BOTH_WAYS = re.compile(r"masked_?(lm|lang|model|im|tok|auto)|bert|bidirect|encoder|prefix|diffusion", re.IGNORECASE)
# What a method does that appends the token that the last output predicts, and a loss of outputs against next tokens.
APPENDS = (r"\bself(\.forward)?\(", r"\[[^][]*,\s*(\[\s*)?-1\b", r"\b(cat|concat|hstack|append)\(")
SHIFTS = (r"loss|cross_?entropy", r":\s*-1\s*[],]", r",\s*1\s*:\s*[],]")


def add_model(walk: Walk, run: ModelRun) -> None:
    """Run a whole model, or a stack, and look at how it is wired."""
    evidence = "seen when the model is run, and run again with one or two of its tokens changed"
    called = {call.path: call.frames for call in reversed(walk.calls)}
    judged = itertools.chain(_judged(walk, run), _judged_masks(walk, run))
    try:
        for what, mistake, where in judged:
            follows = named_mistake(mistake).follows if mistake else ()
            if any(finding.name.startswith(follows) for finding in walk.report.findings):
                continue
            lines = _lines_of(walk, called, mistake, where) if mistake else ()
            mistakes = {mistake: lines} if mistake else {}
            walk.check(f"{what}{f' ({where})' if where else ''}", mistakes, where, evidence)
    except Exception as error:  # the user's code may refuse other tokens than those it ran on
        walk.skip(WHOLE_MODEL, f"on other tokens it raised {type(error).__name__}: {error}")
    for name, frames in _unread_masks(walk.ran) if walk.ran is not None else ():
        walk.check("masks of the model", {"model_mask_dropped": frames}, "", f"no line reads {name}")
    walk.report.conventions += list(_model_rows(run))
    add_decoding(walk, run)
    walk.report.coverage += [*_not_given(walk, run), *_left_out(walk)]


def _not_given(walk: Walk, run: ModelRun) -> Iterator[Exercise]:
    """List what a model may be given beside its tokens and no call gave it; labels change nothing but a loss."""
    module = walk.module
    given = {*run.masks, *unread_arguments(module), *taken_by_losses(type(module))}
    given |= {one.what.partition(" of ")[0] for one in walk.report.coverage}
    for call in [] if walk.ran is None else walk.ran.recorder.calls[:1]:
        arguments = inspect.signature(module.forward).bind(*call.args, **call.kwargs).arguments
        given |= {name for name, x in arguments.items() if x is not None}
    for parameter in parameters_of(module):
        is_switch = isinstance(parameter.default, bool) or "bool" in str(parameter.annotation)
        optional = parameter.default is not parameter.empty and not is_switch
        if optional and parameter.name not in given and not AIM.search(parameter.name):
            yield Exercise(parameter.name, False, "no call passed it")


def _left_out(walk: Walk) -> Iterator[Exercise]:
    """List what attends and takes no part in a run that shows no mistake; the wiring tells of what is in a layer."""
    marks = {mark_of(layer) for _, layer in layers_of(walk.module)}
    layers = [path for path, child in walk.module.named_modules() if path and mark_of(child) in marks]
    idle = [] if walk.report.findings else [one for one in _attending(walk.module) if one in walk.idle]
    for path in dict.fromkeys(outermost(walk.idle, one) for one in idle):
        if not any(is_inside(path, layer) for layer in layers):
            yield Exercise(path, False, "the output does not depend on it")


def _attending(module: nn.Module) -> list[str]:
    return [path for path, kind in atoms_of(module).items() if kind in ("attention", "layers")]


def _unread_masks(ran: Run) -> Iterator[tuple[str, Frames]]:
    """Name the masks that a line makes by comparing ids, and that the rest of its function never reads."""
    for frames in dict.fromkeys(op.frames for op in ran.operations if op.name in ("eq", "ne") and op.frames):
        path, line, function = frames[0]
        nodes = list(ast.walk(function_at(path, function, line) or ast.Module([], [])))
        made = (x.targets[0] for x in nodes if isinstance(x, ast.Assign) and x.lineno == line)
        for name in (x.id for x in made if isinstance(x, ast.Name) and role_of_parameter(x.id) == "mask"):
            if not any(isinstance(x, ast.Name) and x.id == name and isinstance(x.ctx, ast.Load) for x in nodes):
                yield name, frames


def _judged_masks(walk: Walk, run: ModelRun) -> Iterator[tuple[str, str, str]]:
    """Say which masks do not reach the layers of a model."""
    read = masks_of(walk, "", run)
    off = switch_off(walk.module, OF_MASKS)
    idle = [mask for mask in read.masks if off and mask.tried and not mask.used]
    walk.report.coverage += [Exercise(mask.name, False, f"it has no effect: {off} is False") for mask in idle]
    hides, ran = any(mask.name == PADDING for mask in read.masks), [] if walk.ran is None else walk.ran.operations
    compares = any(op.name in COMPARES and op.frames and op.inputs[0].value.dtype == torch.long for op in ran)
    if run.kind == "ids" and (hides or compares):
        walk.report.coverage += padding_not_run(walk.module, run, hides)
    required = {p.name for p in parameters_of(walk.module) if p.default is p.empty}
    for name in (one.name for one in read.masks if one.used and not one.reached and one.name in required):
        walk.skip(WHOLE_MODEL, f"{name} hides no token in any form that was tried")
    read = replace(read, masks=[mask for mask in read.masks if mask not in idle])
    wrong = list(read.mistakes())
    for name, mask, path in wrong or [("", "", "")] * bool(read.masks):
        yield "masks of the model", name, _layer_around(path) or mask * (name in ("mask_never_used", OF_OTHERS))


def _layer_around(path: str) -> str:
    """The outermost module of a list that holds an attention, or else the module around it."""
    numbered = re.match(r"(.*?\.)?\d+(?=\.|$)", path)
    return numbered.group() if numbered else path.rpartition(".")[0]


def _lines_of(walk: Walk, called: Mapping[str, Frames], mistake: str, where: str) -> Frames:
    """The lines that show a mistake: where a sub-module is called, made or runs, or a position is first used."""
    if named_mistake(mistake).ran == "call":  # of a stack, where its first layer is
        return called.get(where, called.get(f"{where}.0", ()))
    if mistake == "part_never_used":
        return assigned_at(walk.module, where)
    if mistake == OF_OTHERS:
        return line_that_sets(type(walk.module).forward, where)
    inside = [x.end for x in walk.calls if x.path == where or is_inside(x.path, where)]
    end = max(inside, default=0) if mistake == OF_ANOTHER else 0
    ran = [op for op in walk.ran.operations if op.frames] if walk.ran is not None else []
    if walk.ran is not None and mistake == "no_positions":
        taken = ((op.frames, walk.ran.recorder.named(bits)) for op in ran for bits in op.origins)
        return next((frames for frames, names in taken if any(map(POSITIONS.search, names))), ())
    if end:
        return next((op.frames for op in ran if op.index >= end and op.name in ("view", "reshape", "permute")), ())
    shown = named_mistake(mistake).ran
    return frames_where(shown, [op for op in ran if op.place == where]) if shown else ()


def say_that_it_does_not_run(walk: Walk, errors: Sequence[str], mistakes: Sequence[str]) -> None:
    """Name what shows in every way in which the model runs, or list the whole as not run, with the error."""
    if mistakes:
        seen = "it is called twice" if mistakes[0] == "random_in_eval" else "one sample of the batch is changed"
        evidence = f"seen when {seen}, in every way in which the model runs"
        lines = () if mistakes[0] == "random_in_eval" else length_first_built(walk.module)
        walk.check("samples are independent", {mistakes[0]: lines}, "", evidence)
        return
    said = f"; it said {errors[0]}" if errors else ""
    if not walk.report.checks:
        raise CannotCheckError(f"No way to run it was found{said}. Pass an instance and a call: verify(model, inputs).")
    why = f"no way to run it was found: its parts and layers were checked, not their order{said}"
    walk.report.coverage.append(Exercise(WHOLE_MODEL, False, why))


def length_first_built(module: nn.Module) -> Frames:
    """The line that builds a layer of torch's whose samples lie along the second axis; none where there is none."""
    torchs = [m for m in module.modules() if is_torchs(m)]
    first = next((m for m in torchs if getattr(m, "batch_first", None) is False), None)
    around = (type(m).__name__ for m in torchs if any(x is first for x in m.modules()))
    built = re.compile(rf"\b({'|'.join(filter(TORCHS.fullmatch, around))})\(")
    for made in (type(owner).__init__ for owner in module.modules()) if first is not None else ():
        found = built.search(source_of(made))
        if found and is_users(path := made.__code__.co_filename):
            return ((path, made.__code__.co_firstlineno + found.string[: found.start()].count("\n"), "__init__"),)
    return ()


def _model_rows(run: ModelRun) -> Iterator[tuple[str, str, str]]:
    """Say whether outputs read later tokens: right in a classifier, wrong in a model that predicts the next token."""
    if run.length_first:
        yield "the model: layout", "(len, batch)", "(len, batch) unless batch_first"
    later = reads_later_tokens(run) if run.kind != "stack" else None
    if later is not None and not run.masks:
        words = "every token, later ones too (BERT)" if later else "no later token (GPT)"
        yield "the model: an output reads", words, ""


def _judged(walk: Walk, run: ModelRun) -> Iterator[Row]:
    """Look at how a model is wired: what was looked at, the name of the mistake ("" if there is none), and where."""
    stacks = list(_stacks(walk.module))
    ran = walk.ran or recorded(walk.module, run, run.source, run.target)
    yield from _unused(walk, ran, stacks)
    with torch.no_grad():
        yield from _judge_stacks(run, ran, stacks)
        if bool(run.call(run.source, run.target).isfinite().all()):
            paths = [path for path, _ in stacks]
            attending = _attending(walk.module)
            last = [path for path in paths if any(is_inside(one, path) for one in attending)][-1:]
            last = last or [one for one in attending if DECODES.search(one)][:1] or attending[:1]
            yield from itertools.chain(_judge_tokens(walk.module, run, paths), _judge_future(walk, run, last))


def _judge_stacks(run: ModelRun, ran: Run, stacks: list[Stack]) -> Iterator[Row]:
    for path, layers in stacks:
        first, second = ({id(p) for p in layer.parameters()} for layer in layers[:2])
        yield "layers of their own", "layers_share_parameters" if first and first == second else "", path
        chained = all(_chained(ran, path, i) for i in range(1, len(layers)))
        yield "layers feed one another", "" if chained else "layers_not_chained", path
    if run.target is not None and len(stacks) == 2:
        yield "memory", _memory_mistake(run, ran, stacks), stacks[1][0]


def _unused(walk: Walk, ran: Run, stacks: list[Stack]) -> Iterator[Row]:
    """Name the norms, embeddings and layers that have no effect, unless the whole module around them has none."""
    module, idle, called = walk.module, walk.idle, {call.path for call in ran.recorder.calls}
    for stack, layers in stacks:
        left_out = [path for path in (f"{stack}.{i}" for i in range(len(layers))) if path not in called]
        if 0 < len(left_out) < len(layers) and left_out[0] in idle:
            yield "all parts take part", "part_never_used", left_out[0]
    attending = _attending(module)
    if attending and idle.issuperset(attending):
        yield "all parts take part", "part_never_used", outermost(idle, attending[0])
    for path in _replaced(ran, attending, idle):
        yield "all parts take part", "part_never_used", path
    for path in [path for path, _ in module.named_modules() if path in idle]:
        child, owner = module.get_submodule(path), path.rpartition(".")[0]
        while owner and isinstance(module.get_submodule(owner), nn.ModuleDict | nn.ModuleList):
            owner = owner.rpartition(".")[0]
        small = "norm" in type(child).__name__.lower() or isinstance(child, nn.Embedding)
        alone = not list(child.children()) and owner not in idle  # else a whole branch is left out
        if small and alone and not _returned_by(module.get_submodule(owner), path):
            yield "all parts take part", "part_never_used", path


def _returned_by(owner: nn.Module, path: str) -> bool:
    """Whether a method returns a part, so that a caller uses it: an embedding, where vectors are handed over."""
    returned = (node.value for node in nodes_of(type(owner)) if isinstance(node, ast.Return) and node.value)
    return any(ast.unparse(value) == f"self.{path.rpartition('.')[2]}" for value in returned)


def _replaced(ran: Run, attending: Sequence[str], idle: Collection[str]) -> Iterator[str]:
    """Name what is idle where another of the same name, but for its number, is called several times."""
    called = Counter(call.path for call in ran.recorder.calls)
    names = {re.sub(r"\d+", "", path) for path in attending if called[path] > 1}
    yield from (path for path in attending if path in idle and re.sub(r"\d+", "", path) in names)


def reads_later_tokens(run: ModelRun) -> bool | None:
    """Whether an output changes with a later token of the last sequence; None where there is no output for each."""
    ids = run.source if run.target is None else run.target
    before = _with(run, ids)
    if before.size(1) not in (ids.size(1), ids.size(1) - 1) or run.kind == "image" or not bool(before.isfinite().all()):
        return None
    other = ids.clone()
    other[:, -2] = ids[:, 0]  # the last one may be cut off, where targets are shifted inside
    return not torch.allclose(before[:, :-2], _with(run, other)[:, :-2], rtol=1e-9, atol=1e-11)


def _judge_future(walk: Walk, run: ModelRun, last: Sequence[str]) -> Iterator[Row]:
    """Say whether outputs read later tokens in a model that predicts the next one, and how it shows that it does."""
    asked, calls = next_token_claim(walk.module) if run.kind in ("ids", "memory") else ("", "")
    later = None if run.kind == "stack" else reads_later_tokens(run)
    if later is None and asked and run.target is None:  # what comes back is of the last token alone
        later = looks_ahead(walk.module, run)
    if later and run.target is None and hides_later_steps(walk.module, run):
        yield "the future is unseen", OF_ANOTHER, next(iter(last), "")
        return
    own = [name for name in run.masks if TARGET.search(name) and makes_where_missing(walk.module, name)]
    if run.masks and not (own and later) and (run.target is not None or "mask" in calls or not calls):
        may_miss = any(p.name in run.masks and p.default is None for p in parameters_of(walk.module))
        if later and (asked if run.target is None else may_miss):
            hides = f"only {' or '.join(run.masks)} hides later tokens, if it is passed"
            walk.report.notes.append("; ".join(filter(None, (asked, hides))))
        return
    claimed = asked or run.target is not None or causal_claim(walk.module, lambda: _with(run, run.source))
    walk.report.notes += [f"it predicts the next token: {asked}"] if asked and later else []
    vocabularies = {m.num_embeddings for m in walk.module.modules() if isinstance(m, nn.Embedding)}
    unsaid = later and not claimed and not BOTH_WAYS.search(type(walk.module).__name__)
    if unsaid and _with(run, run.source).size(-1) in vocabularies:
        walk.report.notes.append(SEES_ALL)
    if later is not None and (claimed or not later):
        yield "the future is unseen", "future_is_seen" if later else "", next(iter(last), "")


def next_token_claim(module: nn.Module) -> tuple[str, str]:
    """Say what shows that a model predicts the next token, how it generates, its loss or its name, and where."""
    name = type(module).__name__
    for own in itertools.takewhile(lambda made: made is not nn.Module, type(module).__mro__):
        for method in filter(inspect.isfunction, vars(own).values()):
            done, text = SHIFTS if method.__name__ == "forward" else APPENDS, source_of(method)
            if all(re.search(one, text) for one in done):
                how = "compares outputs with the next tokens" if done is SHIFTS else "appends what the last output says"
                return f"{method.__name__} {how}", text
    return (f"it is called {name}" if GENERATES.search(name) and not BOTH_WAYS.search(name) else ""), ""


def _judge_tokens(module: nn.Module, run: ModelRun, stacks: list[str]) -> Iterator[Row]:
    if run.kind == "image" and stacks:
        mixed = any(_patches_are_mixed(module, run, path) for path in stacks)
        cuts = nn.Conv2d if any(isinstance(child, nn.Conv2d) for child in module.modules()) else nn.Linear
        first = next(path for path, child in module.named_modules() if isinstance(child, cuts))
        yield "a token for each patch", "patches_mixed" if mixed else "", first.rpartition(".")[0]
    moved = None if run.of_samples else _moved_with_its_place(module, run)
    yield "samples in any order", "position_indexed_by_batch" if moved is not None else "", moved or ""
    # Without ids, tokens may be a set, unless the model holds positions.
    if run.kind not in ("ids", "memory") and not _holds_positions(module):
        return
    if run.target is not None and run.kind != "memory":
        lost = _is_lost(lambda x: run.call(x, run.target), run, run.source)
        yield "positions of the source", "no_positions" if lost else "", "source"
    alone = run.target is None and not _holds_positions(module)
    if alone and not _is_lost(lambda x: run.call(x, None), run, run.source):
        return  # a causal mask alone shows deeper layers the order
    yield (
        "positions",
        "no_positions" if _order_is_lost(module, run, stacks) else "",
        "target" * (run.target is not None),
    )


def _patches_are_mixed(module: nn.Module, run: ModelRun, stack: str) -> bool:
    """Whether changing one patch changes more tokens than its own and a class token; patches must not overlap."""
    patches = [child for child in module.modules() if isinstance(child, nn.Conv2d)]
    if len(patches) > 1 or any(child.kernel_size != child.stride for child in patches):
        return False
    other = run.source.clone()
    other[..., : run.patch, : run.patch] *= -1.7
    before, after = (_inputs(recorded(module, run, x, None), f"{stack}.0") for x in (run.source, other))
    if not before or not after or before[0].shape != after[0].shape:
        return False
    return int((before[0] != after[0]).any(-1).sum()) > 2 * len(other)


def _moved_with_its_place(module: nn.Module, run: ModelRun) -> str | None:
    """Name the first module whose output for a sample depends on its place in the batch; None if there is none."""
    flipped = (run.source.flip(0), None if run.target is None else run.target.flip(0))
    if _same(run.call(run.source, run.target).flip(0), run.call(*flipped)):
        return None
    runs = (recorded(module, run, *given) for given in ((run.source, run.target), flipped))
    calls, others = (sorted(one.recorder.calls, key=lambda call: call.end) for one in runs)
    for one, other in zip(calls, others, strict=False):
        outputs = zip(tensors_in(one.outputs), tensors_in(other.outputs), strict=False)
        if not all(any(_same(x.flip(axis), y) for axis in range(x.dim())) for x, y in outputs):
            return one.path
    return ""


def _holds_positions(module: nn.Module) -> bool:
    """Whether a part, a parameter or a buffer is called a positional encoding."""
    names = [name for child in module.modules() for name in (*child._parameters, *child._buffers, *child._modules)]
    names += [type(child).__name__ for child in module.modules()]
    return any(kind_of_name(name) == "positional_encoding" for name in names)


def _is_lost(call: Callable[[Tensor], Tensor], run: ModelRun, x: Tensor) -> bool:
    """Whether exchanging the first two tokens does not change the last output, though changing them does."""
    before, after, changed = (call(given)[:, -1] for given in (x, run.exchanged(x), run.replaced(x)))
    if torch.allclose(before, changed, rtol=1e-9, atol=1e-11):
        return False
    return torch.allclose(before, after, rtol=1e-9, atol=1e-11)


def _order_is_lost(module: nn.Module, run: ModelRun, stacks: list[str]) -> bool:
    """Whether the first layer's output lacks the order of tokens; in later layers a causal mask alone reveals it."""

    def first_layer(x: Tensor) -> Tensor:
        ran = recorded(module, run, *((x, None) if run.target is None else (run.source, x)))
        called = _call_of(ran, f"{stacks[-1]}.0") if stacks and run.kind != "image" else None
        output = next(tensors_in([*(called.outputs if called is not None else ()), ran.output]))
        sequence_first = output.dim() == 3 and output.size(0) != len(run.source)
        return output.transpose(0, 1) if sequence_first else output

    return _is_lost(first_layer, run, run.source if run.target is None else run.target)


def _stacks(module: nn.Module) -> Iterator[Stack]:
    """List the stacks of at least two layers that hold an attention, those not inside another."""
    outer: list[str] = []
    for path, child in module.named_modules():
        layers = list(child) if isinstance(child, nn.ModuleList | nn.Sequential) else []
        inside = any(path.startswith(f"{other}.") for other in outer)
        alike = len({type(layer) for layer in layers}) == 1 and not isinstance(layers[0], nn.ModuleList | nn.Linear)
        if len(layers) > 1 and alike and not inside and len(list(layers[0].children())) > 1:
            outer.append(path)
            yield path, layers


def _call_of(ran: Run, path: str) -> ModuleCall | None:
    return next((call for call in ran.recorder.calls if call.path == path), None)


def _inputs(ran: Run, path: str) -> list[Tensor]:
    found = _call_of(ran, path)
    return [] if found is None else [x for x in tensors_in(found.inputs) if x.dim() == 3]


def _chained(ran: Run, path: str, number: int) -> bool:
    """Whether a layer of a stack reads the output of the one before it, or at least not the same as the first."""
    first, given = (_inputs(ran, f"{path}.{i}") for i in (0, number))
    repeated = bool(given) and len(first) == len(given) and all(map(identical, first, given))
    return not repeated or _reads(ran, f"{path}.{number}", f"{path}.{number - 1}")


def _reads(ran: Run, reader: str, source: str) -> bool:
    """Whether the input of a sub-module is made from the output of another; assumed if either is not called."""
    gives, takes = _call_of(ran, source), _call_of(ran, reader)
    if gives is None or takes is None:
        return True
    made = {storage_of(x) for x in gives.outputs}
    for operation in ran.operations[gives.end : takes.first]:
        if any(storage_of(slot.tensor) in made for slot in operation.inputs):
            made |= {storage_of(slot.tensor) for slot in operation.outputs}
    return any(storage_of(x) in made for x in tensors_in(takes.inputs))


def _memory_mistake(run: ModelRun, ran: Run, stacks: list[Stack]) -> str:
    assert run.target is not None  # asked only then
    rows = run.call(run.source, run.target).size(1)
    if rows == run.source.size(1) != run.target.size(1):
        return "memory_and_target_exchanged"
    (encoder, layers), (decoder, _) = stacks
    several = len(_inputs(ran, f"{decoder}.0")) > 1
    encoded = not several or _reads(ran, f"{decoder}.0", f"{encoder}.{len(layers) - 1}")
    return "" if encoded else "memory_is_not_encoder_output"


def _same(x: Tensor, y: Tensor) -> bool:
    relative, absolute = (1e-10, 1e-12) if x.dtype == torch.float64 else (1e-5, 1e-5)
    return x.shape == y.shape and torch.allclose(x, y, rtol=relative, atol=absolute)


def _with(run: ModelRun, last: Tensor) -> Tensor:
    return run.call(last, None) if run.target is None else run.call(run.source, last)
