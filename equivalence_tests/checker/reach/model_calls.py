"""Find out how a whole model is called: on token ids, on features, on images, or, a bare stack, on what layers take."""

import inspect
import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from equivalence_tests.checker.reach.calling import (
    Caller,
    CallPlan,
    Inputs,
    call_plans,
    forward_parameters,
    from_layout,
    random_inputs,
    role_of_parameter,
)
from equivalence_tests.checker.reach.construction import Sizes, exact_lengths
from equivalence_tests.checker.reach.errors import said
from equivalence_tests.checker.reach.kept_state import keeping_state
from equivalence_tests.checker.reach.masking import MaskForm
from equivalence_tests.checker.reach.tracing import tensors_in

__all__ = ["OF_SOURCE", "TARGET", "ModelRun", "mixed_samples", "run_layer", "run_model", "run_stack"]

TARGET = re.compile(r"tgt|trg|target|dec|^y$|output")
OF_SOURCE = re.compile(r"src|source|mem|enc|cross")
SEGMENTS = re.compile(r"seg|token_type|^types?$")
IMAGE_SIZE = re.compile(r"(im(g|age)|input)_?(size|height)|resolution", re.IGNORECASE)
LENGTHS = ((7, 5), (6, 6))  # code that mixes up two masks may run on equal lengths only
BATCH = 2
FIRST_ID = 4  # lower ones are often padding, start and end
MOST_WIDTHS = 3
Given = Mapping[str, Tensor]


@dataclass(frozen=True)
class ModelRun:
    """How a model is called.

    Args:
        run: Gives the output, (batch, len, features), of source, target and masks by name.
        source: The source, batch first; the only sequence where there is one.
        target: The target; None where there is one sequence.
        masks: Names of the masks that come from outside.
        kind: What the sequences are: ids, features, an image, what goes into a stack of layers, or, of a decoder that
            embeds its own ids, a memory and ids.
        turned: Whether the length comes before the batch.
        patch: Width of the patches of an image.
    """

    run: Callable[[Tensor, Tensor | None, Given], Tensor]
    source: Tensor
    target: Tensor | None
    masks: tuple[str, ...] = ()
    kind: str = "ids"
    turned: bool = False
    patch: int = 1

    @property
    def masked(self) -> bool:
        """Whether masks come from outside."""
        return bool(self.masks)

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


@dataclass
class Attempts:
    """The ways in which a model runs, and what it said to the others.

    Args:
        said: What it said when it did not run, last first.
        wrong: The mistake that shows in every way in which it runs.
    """

    said: list[str] = field(default_factory=list)
    wrong: str = ""


def run_model(module: nn.Module) -> tuple[ModelRun | None, Attempts]:
    """Find out how to call a model.

    Args:
        module: A model that takes ids, features or images.

    Returns:
        How, or None if no way was found, and what was tried.
    """
    attempts = Attempts()
    parameters = forward_parameters(module)
    masks = _masks_among(parameters)
    required = [p.name for p in parameters if p.default is p.empty]
    segments = [name for name in required if SEGMENTS.search(name)]
    names = [name for name in required if name not in masks and name not in segments]
    if len(names) not in (1, 2):
        return None, attempts
    names = sorted(names, key=lambda name: bool(TARGET.search(name.lower()))) if len(names) == 2 else names
    way = _Way(module, names, masks, [name for name in required if name in masks], segments)
    ways = {"memory": [way, replace(way, names=names[::-1])]}
    blind: ModelRun | None = None  # a required mask was given in a form that hides everything
    for kind, drawn, patch in _drawn(module, len(names)):
        turns = (False,) if kind == "image" else (False, True)
        for one, form, turned in itertools.product(ways.get(kind, [way]), way.mask_forms(), turns):
            run = one.attempt(kind, drawn, form, turned, patch, attempts)
            wrong = None if run is None else mixed_samples(run)
            if run is not None and wrong == "":
                if form is None or bool(run.call(run.source, run.target).isfinite().all()):
                    return run, attempts
                blind = blind or run
            attempts.wrong = attempts.wrong or wrong or ""
    return blind, attempts


def _masks_among(parameters: list[inspect.Parameter]) -> tuple[str, ...]:
    masks = (p for p in parameters if role_of_parameter(p.name) == "mask")
    return tuple(p.name for p in masks if not isinstance(p.default, bool | int | float | str))


def mixed_samples(run: ModelRun) -> str | None:
    """Name what shows that batch and length are mixed up, when sample 0 becomes another.

    Args:
        run: How the model is called.

    Returns:
        "samples_mixed" where sample 1 changes, "input_never_read" where sample 0 does not; "" if all is well,
        None if it does not run on the other sample.
    """
    others = [x if x is None else torch.cat([x[:1].flip(1), x[1:]]) for x in (run.source, run.target)]
    assert others[0] is not None  # a source there is
    try:
        with torch.no_grad():
            before, after = run.call(run.source, run.target), run.call(others[0], others[1])
    except Exception:  # the user's code may raise anything
        return None
    same = [torch.allclose(x, y, rtol=1e-9, atol=1e-11, equal_nan=True) for x, y in zip(before, after, strict=True)]
    if not same[1]:
        return "samples_mixed"
    return "input_never_read" if same[0] and bool(before.isfinite().all()) else ""


def _drawn(module: nn.Module, count: int) -> Iterator[tuple[str, list[Tensor], int]]:
    """Draw what the model may take: ids where it has embeddings, images where it has patches, features else."""
    generator = torch.Generator().manual_seed(0)
    vocabularies = [m.num_embeddings for m in module.modules() if isinstance(m, nn.Embedding)]
    sizes = [n for n in vocabularies if n > FIRST_ID + 2]
    lengths = [*LENGTHS, *((n, n) for n in exact_lengths(module))]
    if sizes:
        for one in lengths:
            yield "ids", [_distinct(min(sizes), length, generator) for length in one[:count]], 1
    if sizes and count == 2:
        width = next(m.embedding_dim for m in module.modules() if isinstance(m, nn.Embedding))
        for source, target in LENGTHS:
            memory = torch.randn(BATCH, source, width, generator=generator)
            yield "memory", [memory, _distinct(min(sizes), target, generator)], 1
    patches = next((m for m in module.modules() if isinstance(m, nn.Conv2d)), None)
    if patches is not None:
        for size in _image_sizes(module):
            image = torch.randn(BATCH, patches.in_channels, size, size, generator=generator)
            yield "image", [image], int(patches.kernel_size[0])
    elif not sizes:
        widths = list(dict.fromkeys(m.in_features for m in module.modules() if isinstance(m, nn.Linear)))
        for one, width in itertools.product(lengths, widths[:MOST_WIDTHS]):
            yield "features", [torch.randn(BATCH, length, width, generator=generator) for length in one[:count]], 1


def _image_sizes(module: nn.Module) -> list[int]:
    named = [v for m in module.modules() for name, v in vars(m).items() if IMAGE_SIZE.search(name)]
    told = [v[0] if isinstance(v, tuple | list) and v else v for v in named]
    conv = next(m for m in module.modules() if isinstance(m, nn.Conv2d))
    sides = [math.isqrt(n) * int(conv.kernel_size[0]) for length in exact_lengths(module) for n in (length, length - 1)]
    fewest = 2 * int(conv.kernel_size[0])  # two patches can be exchanged
    return [n for n in dict.fromkeys([*told, *sides, 32, 28, 64, 224]) if isinstance(n, int) and n >= fewest]


def _distinct(size: int, length: int, generator: torch.Generator) -> Tensor:
    """Draw ids, no two of a row alike where the vocabulary allows it."""
    rows = [FIRST_ID + torch.randperm(size - FIRST_ID, generator=generator) for _ in range(BATCH)]
    return torch.stack([row.repeat(length)[:length] for row in rows])


@dataclass(frozen=True)
class _Way:
    """The arguments of a model, and which of them are what."""

    module: nn.Module
    names: Sequence[str]
    masks: tuple[str, ...]
    needed: Sequence[str]
    segments: Sequence[str]

    def mask_forms(self) -> list[MaskForm | None]:
        """Nothing for each mask that is required, or one that hides nothing."""
        return [None, *MaskForm.neutral_forms()] if self.needed else [None]

    def attempt(
        self, kind: str, drawn: list[Tensor], form: MaskForm | None, turned: bool, patch: int, attempts: Attempts
    ) -> ModelRun | None:
        def run(source: Tensor, target: Tensor | None, given: Given) -> Tensor:
            tensors = [source] if target is None else [source, target]
            laid = [x.transpose(0, 1) if turned else x for x in tensors]
            arguments: dict[str, Any] = dict(zip(self.names, laid, strict=True))
            arguments |= {name: torch.zeros_like(laid[0]) for name in self.segments}
            arguments |= {name: _neutral(form, name, source, target) for name in self.needed} | dict(given)
            return _output(self.module(**arguments), tensors[-1], turned)

        source, target = drawn[0], drawn[1] if len(drawn) == 2 else None
        try:
            run(source, target, {})
        except Exception as error:  # not the way in which it is called
            attempts.said.append(said(error))
            return None
        return ModelRun(run, source, target, self.masks, kind, turned, patch)


def _neutral(form: MaskForm | None, name: str, source: Tensor, target: Tensor | None) -> Tensor | None:
    if form is None:
        return None
    of_target = target is not None and TARGET.search(name.lower())
    length = target.size(1) if of_target and target is not None else source.size(1)
    return form.build(torch.ones(BATCH, length, length, dtype=torch.bool), 1, torch.get_default_dtype())


def _output(returned: Any, ids: Tensor, turned: bool) -> Tensor:
    """Pick what has one row for each token of the last sequence, batch first."""
    found = [x.transpose(0, 1) if turned and x.dim() == 3 else x for x in tensors_in((returned,))]
    shape = ids.shape[:2]
    for x in found:
        if x.dim() == 3 and x.shape[:2] == shape:
            return x
    for x in found:  # all tokens in one axis
        if x.dim() == 2 and len(x) == shape.numel():
            return x.view(*shape, -1) if not turned else x.view(*shape[::-1], -1).transpose(0, 1)
    for x in found:  # of the last token, or of the whole sequence
        if x.dim() in (2, 3) and len(x) == len(ids) and x.size(1) != ids.size(1):
            return x if x.dim() == 3 else x[:, None]
    raise ValueError("no output for each token")


def run_stack(caller: Caller, sizes: Sizes) -> ModelRun | None:
    """Call a bare stack of layers as its layers are called.

    Args:
        caller: Holds the stack.
        sizes: Of the tensors.

    Returns:
        How, or None if no way was found.
    """
    ways = itertools.islice(call_plans(caller, sizes, []), 4)
    found = (run_layer(caller, plan, lengths) for plan, lengths in ways)
    return next((run for run in found if mixed_samples(run) == ""), None)


def run_layer(caller: Caller, plan: CallPlan, lengths: Sizes) -> ModelRun:
    """Take a layer, or a stack of them, for a model: its source is the memory, or the only tensor there is.

    Args:
        caller: Holds the layer.
        plan: How it is called.
        lengths: Of the tensors.
    """
    inputs, parameters = random_inputs(lengths, plan, 0), forward_parameters(caller.function)
    has_memory = any(role_of_parameter(p.name) in ("memory", "key") for p in parameters)
    missing = plan.self_attention and has_memory  # a mask of the memory has nothing to hide then
    masks = tuple(name for name in _masks_among(parameters) if not (missing and OF_SOURCE.search(name.lower())))

    def run(source: Tensor, target: Tensor | None, given: Given) -> Tensor:
        args, kwargs = caller.arguments(plan, Inputs(source if target is None else target, source, source), None)
        with keeping_state(caller.function):
            returned = caller.function(*args, **{**kwargs, **given})
        return from_layout(list(tensors_in((returned,)))[plan.output], plan.layout)

    source, target = (inputs.query, None) if plan.self_attention else (inputs.key, inputs.query)
    return ModelRun(run, source, target, masks, "stack")
