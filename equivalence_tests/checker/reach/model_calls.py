"""Find out how a whole model is called: on token ids, on features, on images, or, a bare stack, on what layers take."""

import ast
import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from inspect import Parameter
from typing import Any

import torch
from torch import Tensor, nn

from equivalence_tests.checker.reach.arguments import ADDED_POSITIONS, IMAGE_SIDE, PATCH_SIDE, Sizes, role_of_parameter
from equivalence_tests.checker.reach.calling import CONSTANTS, POSITIONS_OF, Inputs, Trial
from equivalence_tests.checker.reach.masking import MaskForm
from equivalence_tests.checker.reach.plans import POSITION, POSITIONS, trials_of
from equivalence_tests.checker.reach.proposing import (
    LONGEST,
    SHORT,
    compared_by,
    exact_lengths,
    nodes_of,
    parameters_of,
    parsed,
    ranked,
    taken_by_parts,
    unread_arguments,
)
from equivalence_tests.checker.reach.state import attempt, keeping_state
from equivalence_tests.checker.reach.tracing import tensors_in
from equivalence_tests.checker.reach.tried import TRIED
from equivalence_tests.checker.reporting.lines import source_of

TARGET = re.compile(r"tgt|trg|target|dec|^y$|output")
AIM = re.compile(r"label|tgt|trg|target|decoder_input")
DECODES = re.compile(r"tgt|trg|dec")
LOSS = re.compile(r"cross_?entropy|nll_loss", re.IGNORECASE)
OF_SOURCE = re.compile(r"src|source|mem|enc|cross")
SEGMENTS = re.compile(r"seg|token_type|^types?$")
TIME = re.compile(r"^ts?$|time|step|sigma|noise|^tau$", re.IGNORECASE)
OF_PLACES = re.compile(rf"{ADDED_POSITIONS.pattern}|pos|{TIME.pattern}", re.IGNORECASE)
IMAGE_SIZE = re.compile(r"(im(g|age)|input)_?(size|height)|resolution", re.IGNORECASE)
PATCHES = (16, 8, 4)  # sides of patches that are usual
LENGTHS = ((7, 5), (6, 6))  # code that mixes up two masks may run on equal lengths only
BATCH = 2
FIRST_ID = 4  # lower ones are often padding, start and end
MOST_WIDTHS, COLOURS = 3, 4  # the last with that of transparency
MOST_TRIALS, MOST_CONDITIONED = 4, 8
MOST_NUMBERS = 1 << 20  # in an image
GIVEN = ("mask", "segments", "positions", "source", "target")  # the roles of what is not of each sample
Given = Mapping[str, Tensor]
Drawn = tuple[str, list[Tensor], int]  # what it is, the tensors and the width of the patches of an image


@dataclass(frozen=True)
class ModelRun:
    """How a model is called."""

    run: Callable[[Tensor, Tensor | None, Given], Tensor]  # of source, target and masks: (batch, len, features)
    source: Tensor  # the source, batch first; the only sequence where there is one
    target: Tensor | None  # the target; None where there is one sequence
    masks: tuple[str, ...] = ()  # names of the masks that come from outside
    # What the sequences are: ids, features, an image, what goes into a stack of layers, or a memory and ids.
    kind: str = "ids"
    length_first: bool = False  # whether the length comes before the batch
    patch: int = 1  # width of the patches of an image
    of_samples: bool = False  # whether it is given something of each sample beside the tokens, the same in each call
    arguments: Callable[[Tensor, Tensor], dict[str, Any]] | None = None  # of source and target; None for a layer
    layout: str = ""  # of what a layer is given; "" for a model

    def call(self, source: Tensor, target: Tensor | None) -> Tensor:
        """Run it with masks that hide nothing."""
        return self.run(source, target, {})

    def exchanged(self, x: Tensor) -> Tensor:
        """Exchange the first two tokens, or patches."""
        if self.kind != "image":
            return x[:, [1, 0, *range(2, x.size(1))]]
        first, second, rest = x.split([self.patch, self.patch, x.size(-1) - 2 * self.patch], -1)
        return torch.cat([second, first, rest], -1)

    def replaced(self, x: Tensor) -> Tensor:
        """Put another token, or patch, in place of the first."""
        other = x.clone()
        if self.kind == "image":
            other[..., : self.patch] = x[..., -self.patch :]
        else:
            other[:, 0] = x[:, 2]
        return other


def run_model(module: nn.Module, sizes: Sizes, errors: list[str], mistakes: list[str]) -> ModelRun | None:
    """Find out how a model, or a bare stack, which takes what its layers do, is called; None if no way is right.

    ``errors`` receives what it said when it did not run, ``mistakes`` what shows when it ran and was wrong.
    """
    embeds = any(isinstance(m, nn.Embedding) or _cuts(m) for m in module.modules())
    trials = () if embeds else itertools.islice(trials_of(module, sizes, torch.float64), MOST_TRIALS)
    stacks = ((run_layer(trial), trial.plan.neutral is not None) for trial in trials)
    blind: ModelRun | None = None  # a required mask was given in a form that hides everything
    for run, masked in itertools.chain(stacks, _runs(module, errors)):
        wrong = _mixed_samples(run)
        if wrong == "":
            if not masked or bool(run.call(run.source, run.target).isfinite().all()):
                return run
            blind = blind or run
        elif wrong and run.kind != "stack":
            mistakes.append(wrong)
    return blind


def _cuts(module: nn.Module) -> bool:
    """Whether it makes fewer tokens of an image, or of its colours."""
    return isinstance(module, nn.Conv2d) and ({*module.stride} != {1} or module.in_channels <= COLOURS)


def run_layer(trial: Trial) -> ModelRun:
    """Take a layer, or a stack of them, for a model: its source is the memory, or the only tensor there is."""
    inputs, alone, parameters = trial.inputs(seed=0), "query" not in trial.plan.given, parameters_of(trial.function)
    missing = alone and any(role_of_parameter(p.name) in ("memory", "key") for p in parameters)
    names = (p.name for p in parameters if _role(p) == "mask")  # one of the memory that is missing has nothing to hide
    masks = tuple(name for name in names if not (missing and OF_SOURCE.search(name.lower())))

    def run(source: Tensor, target: Tensor | None, given: Given) -> Tensor:
        return trial.output(Inputs(source if target is None else target, source, source), given)

    vectors = any(role.startswith("=(") or role in POSITIONS_OF for role in trial.plan.given)
    return ModelRun(
        run, inputs.key, None if alone else inputs.query, masks, "stack", of_samples=vectors, layout=trial.plan.layout
    )


def _runs(module: nn.Module, errors: list[str]) -> Iterator[tuple[ModelRun, bool]]:
    """Give the calls that run, with whether masks are passed: on required arguments, else on optional ones too."""
    parameters = parameters_of(module)
    required = {p.name: _role(p) for p in parameters if p.default is p.empty}
    aims = [p.name for p in parameters if p.default is None and not _role(p) and AIM.search(p.name)]
    other = [{**required, p.name: f"={not p.default}"} for p in parameters if isinstance(p.default, bool)]
    conditioned = itertools.islice(_conditioned(module, required), MOST_CONDITIONED)
    drawn = cache(lambda count: [*_drawn(module, count)])
    ways = [required] if (left_out := _aims_of_a_loss(module, required)) == {} else [required | left_out, required]
    several = [{**required, **_beside(module, required)}]
    named = {p.name: role for p in parameters if p.default is None and (role := _role(p))}
    several += [required | named] if named else []  # a part may need what may be left out here
    for roles in itertools.chain(ways, several, ({**required, aim: ""} for aim in aims), other, conditioned):
        runs = _runs_of(module, roles, drawn, errors)
        first = next(runs, None)
        if first is not None:
            yield from itertools.chain([first], runs)
            return


def _aims_of_a_loss(module: nn.Module, roles: Mapping[str, str]) -> dict[str, str]:
    """Give the role "=None" to each argument that may be None and is otherwise the target of the model's own loss."""
    compared = compared_by(type(module)) if LOSS.search(source_of(type(module))) else {}
    unsaid = (name for name, role in roles.items() if not role and not DECODES.search(name.lower()))
    return {name: "=None" for name in unsaid if None in compared.get(name, [])}


def taken_by_losses(target: type) -> set[str]:
    """Name the variables that the losses of a class take."""
    calls = (node for node in nodes_of(target) if isinstance(node, ast.Call))
    losses = (node for node in calls if LOSS.search(ast.unparse(node.func)))
    return {x.id for node in losses for x in ast.walk(node) if isinstance(x, ast.Name)}


def _conditioned(module: nn.Module, roles: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """Give roles for arguments beside one sequence or image: a time step, a class or a vector for each sample."""
    others = [name for name, role in roles.items() if not role][1:]
    widths = dict.fromkeys(m.in_features for m in module.modules() if isinstance(m, nn.Linear))
    vectors = [f"vector {width}" for width in [*widths][:MOST_WIDTHS]]
    steps = ["steps", "times"]
    likely = [[*steps, *vectors] if TIME.search(name) else ["classes", *vectors, *steps] for name in others]
    for chosen in ranked(likely) if others else ():
        yield {**roles, **dict(zip(others, chosen, strict=True))}


def _beside(module: nn.Module, roles: Mapping[str, str]) -> dict[str, str]:
    """Give roles for arguments beside one sequence, or two, by the matrices and the embeddings that take them.

    Those that may be left out are items to be scored where the first sequence goes to the same embedding. An argument
    that nothing reads, as the user's id often is, gets None.
    """
    taken = {n: x for n, x in taken_by_parts(module).items() if not roles.get(n)}
    kinds = {n: f"features {x.in_features}" if isinstance(x, nn.Linear) else "ids" for n, x in taken.items()}
    told = [n for n in roles if n in kinds and not (OF_PLACES.search(n.lower()) or kinds[n] == "features 1")]
    wide = [n for n in told if kinds[n] != "ids"]
    first = next((n for n in wide or told if not TARGET.search(n.lower())), "")
    last = next((n for n in told if not wide and TARGET.search(n.lower())), "")
    optional = [p.name for p in parameters_of(module) if p.default is None and not AIM.search(p.name)]
    items = [name for name in optional if taken.get(name) is taken.get(first)]
    beside = [n for n in (*roles, *items) if n in kinds and n not in (first, last)] if first else []
    return {n: "=None" for n in roles if n in unread_arguments(module)} | {n: kinds[n] for n in beside}


def _of_samples(role: str, batch: int) -> Tensor:
    """Make the tensor for such a role: a time step, a class or a vector for each sample."""
    kind, _, width = role.partition(" ")
    if kind == "vector":
        return torch.randn(batch, int(width), generator=torch.Generator().manual_seed(9))
    numbers = torch.arange(batch)
    return numbers % 2 if kind == "classes" else 3 + 4 * numbers if kind == "steps" else (1 + numbers) / (2 + batch)


def _runs_of(
    module: nn.Module, roles: dict[str, str], drawn_for: Callable[[int], list[Drawn]], errors: list[str]
) -> Iterator[tuple[ModelRun, bool]]:
    """Give each call with these roles that runs, on every kind of input, and whether its masks are all neutral."""
    masks = tuple(p.name for p in parameters_of(module) if _role(p) == "mask")
    names = sorted((n for n, role in roles.items() if not role), key=lambda name: bool(TARGET.search(name.lower())))
    if len(names) not in (1, 2):
        return
    forms = [None, *MaskForm.neutral_forms()] if "mask" in roles.values() else [None]
    for kind, drawn, patch in drawn_for(len(names)):
        source, target = drawn[0], drawn[1] if len(drawn) == 2 else None
        orders = (names, names[::-1]) if kind == "memory" else (names,)
        turns = (False,) if kind == "image" else (False, True)
        for order, form, length_first in itertools.product(orders, forms, turns):
            given_roles = roles | dict(zip(order, ("source", "target"), strict=False))
            arguments = partial(_arguments, given_roles, form, length_first)
            run = partial(_run, module, arguments, length_first)
            runs = attempt(partial(run, source, target, {}), errors) is not None
            given = (), arguments(source, source if target is None else target)
            TRIED.called(module, partial(tuple[Any, ...], given), "" if runs else errors[-1])
            if runs:
                beside = not {*given_roles.values()} <= {*GIVEN, *CONSTANTS}
                found = ModelRun(run, source, target, masks, kind, length_first, patch, beside, arguments)
                yield found, form is not None


def _role(parameter: Parameter) -> str:
    """Give the role of an argument: "mask", "segments", "positions", "=0" for the first, or "" for a sequence."""
    if POSITION.search(parameter.name.lower()):
        return "=0"
    if SEGMENTS.search(parameter.name):
        return "segments"
    if POSITIONS.search(parameter.name.lower()):
        return "positions"
    masks = role_of_parameter(parameter.name) == "mask" and not isinstance(parameter.default, bool | int | float | str)
    return "mask" if masks else ""


def _run(
    module: nn.Module,
    arguments: Callable[[Tensor, Tensor], dict[str, Any]],
    length_first: bool,
    source: Tensor,
    target: Tensor | None,
    given: Given,
) -> Tensor:
    last = source if target is None else target
    with keeping_state(module):
        return _output(module(**arguments(source, last) | dict(given)), last, length_first)


def _arguments(
    roles: Mapping[str, str], form: MaskForm | None, length_first: bool, source: Tensor, last: Tensor
) -> dict[str, Any]:
    """Give each argument its tensor, and each mask one that hides nothing, in this form."""
    tensors = {"source": source, "target": last}
    arguments: dict[str, Any] = {}
    for name, role in roles.items():
        if role == "mask" and form is not None:
            may_attend = torch.ones(len(source), *2 * [(last if TARGET.search(name.lower()) else source).size(1)])
            arguments[name] = form.build(may_attend.bool(), 1, torch.get_default_dtype())
        elif role == "ids" or role.startswith("features"):
            beside = _beside_tokens(role, *(last if TARGET.search(name.lower()) else source).shape[:2])
            arguments[name] = beside.transpose(0, 1) if length_first else beside
        elif role in ("segments", "positions"):
            first = torch.zeros(source.shape[:2], dtype=torch.long)
            numbers = first if role == "segments" else first + torch.arange(source.size(1))
            arguments[name] = numbers.transpose(0, 1) if length_first else numbers
        elif role == "mask" or role in tensors:
            x = tensors.get(role)
            arguments[name] = x.transpose(0, 1) if length_first and x is not None else x
        elif role in CONSTANTS:
            arguments[name] = CONSTANTS[role]
        else:
            arguments[name] = _of_samples(role, len(source))
    return arguments


def _beside_tokens(role: str, batch: int, length: int) -> Tensor:
    """Make what goes to a matrix or an embedding of its own beside the tokens: features, or numbers that rise."""
    width = int(role.partition(" ")[2] or 0)
    drawn = torch.arange(batch * length * width).mul(0.7).sin().view(batch, length, width)
    return drawn if width else torch.arange(1, length + 1).expand(batch, -1)


def _mixed_samples(run: ModelRun) -> str | None:
    """Change sample 0 and name the mistake that shows: sample 1 changes, sample 0 does not, or equal calls differ.

    It is "" if all is well, and None if the model does not run on the changed sample.
    """

    def changed(x: Tensor) -> Tensor:  # flipped on all axes, since an image may have one channel
        other = torch.cat([x[:1].flip(*range(1, x.dim())), x[1:]])
        new = x[1][~torch.isin(x[1], x[0])] if x.dim() == 2 else x[:0]  # since a mean is the same in any order
        if len(new):
            other[0, 0] = new[0]
        return other

    others = changed(run.source), None if run.target is None else changed(run.target)
    ran = attempt(lambda: [run.call(*given) for given in ((run.source, run.target), (run.source, run.target), others)])
    if ran is None or len(ran[0]) < 2:  # a single row is of no sample
        return None
    before, again, after = ran
    if not torch.allclose(before, again, rtol=1e-9, atol=1e-11, equal_nan=True):
        return "random_in_eval"
    same = [torch.allclose(x, y, rtol=1e-9, atol=1e-11, equal_nan=True) for x, y in zip(before, after, strict=True)]
    if not same[1]:
        return "samples_mixed"
    return "input_never_read" if same[0] and bool(before.isfinite().all()) else ""


def _drawn(module: nn.Module, count: int) -> Iterator[Drawn]:
    """Draw what the model may take: ids where it has embeddings, images where it has patches, features else."""
    generator = torch.Generator().manual_seed(0)
    sizes = [n for n in vocabularies(module) if n > FIRST_ID + 2]
    exact = (n for length in exact_lengths(module) for n in (length, length - 1))  # a class token may come before them
    lengths = [*LENGTHS, *((n, n) for n in (*exact, *_flattened(module)))]
    if sizes:
        for one in lengths:
            yield "ids", [_distinct(min(sizes), length, generator) for length in one[:count]], 1
    projected = list(dict.fromkeys(m.in_features for m in module.modules() if isinstance(m, nn.Linear)))[:MOST_WIDTHS]
    if sizes and count == 2:
        own = next(m.embedding_dim for m in module.modules() if isinstance(m, nn.Embedding))
        for (source, target), width in itertools.product(LENGTHS, dict.fromkeys([own, *projected])):
            memory = torch.randn(BATCH, source, width, generator=generator)
            yield "memory", [memory, _distinct(min(sizes), target, generator)], 1
    convolved = any(isinstance(m, nn.Conv2d) for m in module.modules())
    if not convolved:  # a table may hold positions alone
        for one, width in itertools.product(lengths, projected):
            yield "features", [torch.randn(BATCH, length, width, generator=generator) for length in one[:count]], 1
    for stated, (channels, patch) in itertools.product(
        (True, False), _patches(module) if convolved or not sizes else ()
    ):
        for side in (n for n in _image_sides(module, patch, stated) if channels * n * n <= MOST_NUMBERS):
            yield "image", [torch.randn(BATCH, channels, side, side, generator=generator)], patch


def _flattened(module: nn.Module) -> list[int]:
    """How many tokens a matrix takes that takes the features of all, one token after another."""
    taken = [m.in_features for m in module.modules() if isinstance(m, nn.Linear)]
    widths = [m.normalized_shape[-1] for m in module.modules() if isinstance(m, nn.LayerNorm)]
    whole = (n // width for n in taken for width in [*taken[:1], *widths[:1]] if n % width == 0)
    return [n for n in dict.fromkeys(whole) if SHORT < n <= LONGEST]


def vocabularies(module: nn.Module) -> list[int]:
    """List how many ids each embedding of a model knows, and each matrix in which a forward looks ids up."""
    known = [m.num_embeddings for m in module.modules() if isinstance(m, nn.Embedding)]
    return known + [len(table) for m in module.modules() for table in _tables_of_ids(m)]


def _tables_of_ids(module: nn.Module) -> Iterator[nn.Parameter]:
    """List the matrices in which a forward looks its arguments up, as an embedding does."""
    given = {p.name for p in parameters_of(module)} if module._parameters else set[str]()
    for node in parsed(source_of(type(module))) if given else ():
        match node:
            case ast.Subscript(ast.Attribute(ast.Name(id="self"), attr=name), ast.Name(id=argument)):
                table = module._parameters.get(name)
                if argument in given and table is not None and table.dim() == 2:
                    yield table


def _patches(module: nn.Module) -> list[tuple[int, int]]:
    """The channels and the side of the patches that an image is cut into, by a convolution or before a projection."""
    found = [(m.in_channels, int(m.kernel_size[0])) for m in module.modules() if isinstance(m, nn.Conv2d)]
    if found:
        return found[:1]
    widths = dict.fromkeys(m.in_features for m in module.modules() if isinstance(m, nn.Linear))
    cut = itertools.product(list(widths)[:MOST_WIDTHS], (PATCH_SIDE, *PATCHES))
    return [(width // side**2, side) for width, side in cut if width % side**2 == 0]


def _image_sides(module: nn.Module, patch: int, stated: bool) -> list[int]:
    """How large images may be: as the module says, or as many do."""
    named = [v for m in module.modules() for name, v in vars(m).items() if IMAGE_SIZE.search(name)]
    sides = [v[0] if isinstance(v, tuple | list) and v else v for v in named]
    sides += [math.isqrt(n) * patch for length in exact_lengths(module) for n in (length, length - 1)]
    usual = (IMAGE_SIDE, 32, 28, 64, 224)
    whole = [n for n in dict.fromkeys(sides if stated else usual) if isinstance(n, int)]
    return [n for n in whole if n >= 2 * patch]  # two patches can be exchanged


def _distinct(size: int, length: int, generator: torch.Generator) -> Tensor:
    """Draw ids, no two of a row alike where the vocabulary allows it."""
    rows = [FIRST_ID + torch.randperm(size - FIRST_ID, generator=generator) for _ in range(BATCH)]
    return torch.stack([row.repeat(length)[:length] for row in rows])


def _output(returned: Any, ids: Tensor, length_first: bool) -> Tensor:
    """Pick what has one row for each token of the last sequence, batch first; else one for the whole."""
    found = [x.transpose(0, 1) if length_first and x.dim() == 3 else x for x in tensors_in((returned,))]
    batch, length = ids.shape[:2]
    ends = {batch * (length - cut): length - cut for cut in (0, 1)}  # where targets are shifted inside, one is cut off
    rows = [(x, ends[len(x)]) for x in found if x.dim() == 2 and len(x) in ends]
    all_tokens = [x.unflatten(0, (count, batch) if length_first else (batch, count)) for x, count in rows]
    image = ids.dim() == 4  # whose second axis holds no tokens
    of_whole = [x for x in found if x.dim() in (2, 3) and len(x) == batch and (image or x.size(1) != length)]
    picked = [x for x in found[:1] if x.dim() == 3 and x.shape[:2] == (batch, 1)]  # of the last token: a cache follows
    picked += [x for x in found if x.dim() == 3 and x.shape[:2] == ids.shape[:2]]
    picked += [x.transpose(0, 1) for x in found if x.dim() == 3 and x.shape[:2] == (length, batch) and not length_first]
    picked += [x.transpose(0, 1) if length_first else x for x in all_tokens]
    picked += [x[..., None] for x in found if x.dim() == 2 and x.shape == ids.shape[:2] and not image]
    picked += [x if x.dim() == 3 else x[:, None] for x in of_whole]
    picked += [x.flatten(2).mT for x in found if x.dim() == 4 and len(x) == batch and image]  # of each pixel
    picked += [x[:, None, None] for x in found if x.dim() == 1 and len(x) == batch]  # a number for each sample
    if not picked:
        raise ValueError("no output for each token")
    return picked[0]
