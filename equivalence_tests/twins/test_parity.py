"""The promises about names and source: both packages mirror torch.nn and each other, and scratch is by hand."""

import ast
import dataclasses
import importlib
import inspect
import itertools
import operator
import re
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import flex_attention, varlen
from torch.overrides import TorchFunctionMode
from torch.torch_version import TorchVersion

import builtin
import scratch
from equivalence_tests.instruments.error_cases import LAYER, construct
from equivalence_tests.instruments.side_by_side import CLASSES, PACKAGES, TORCH
from scratch.decoding import KeyValueCache

pytestmark = pytest.mark.filterwarnings("ignore:enable_nested_tensor is True:UserWarning")

IS_OLD = torch.__version__ < TorchVersion("2.13")
ROOT = Path(scratch.__file__).parents[1]

# What goes beyond torch's signatures: keyword-only, the same in both packages, and only this.
EXTENSIONS: dict[str, dict[str, set[str]]] = {
    "MultiheadAttention": {"__init__": {"qk_head_dim", "v_head_dim"}, "forward": {"cache"}},
    "TransformerEncoderLayer": {"__init__": {"qk_head_dim", "v_head_dim"}, "forward": set()},
    "TransformerDecoderLayer": {"__init__": {"qk_head_dim", "v_head_dim"}, "forward": {"cache"}},
    "TransformerEncoder": {"__init__": set(), "forward": set()},
    "TransformerDecoder": {"__init__": set(), "forward": {"cache"}},
    "Transformer": {"__init__": {"qk_head_dim", "v_head_dim"}, "forward": set()},
}
METHODS = [(component, method) for component, methods in EXTENSIONS.items() for method in methods]


def parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(function).parameters)


class TestSignatures:
    @pytest.mark.parametrize(("component", "method"), METHODS)
    @pytest.mark.parametrize("package", PACKAGES)
    def test_names_order_kinds_and_defaults_are_torchs(self, package: str, component: str, method: str) -> None:
        ours = parameters(getattr(getattr(PACKAGES[package], component), method))
        extensions = {name for name, x in ours.items() if x.kind is inspect.Parameter.KEYWORD_ONLY}
        assert extensions == EXTENSIONS[component][method]
        theirs = parameters(getattr(getattr(nn, component), method))
        mirrored = [(name, x.kind, x.default) for name, x in ours.items() if name not in extensions]
        assert mirrored == [(name, x.kind, x.default) for name, x in theirs.items()]

    @pytest.mark.parametrize(("component", "method"), METHODS)
    @pytest.mark.parametrize("package", PACKAGES)
    def test_extensions_are_off_unless_given(self, package: str, component: str, method: str) -> None:
        ours = parameters(getattr(getattr(PACKAGES[package], component), method))
        assert all(ours[name].default is None for name in EXTENSIONS[component][method])

    @pytest.mark.parametrize("package", PACKAGES)
    def test_scaled_dot_product_attention_has_torchs_signature(self, package: str) -> None:
        ours = parameters(PACKAGES[package].scaled_dot_product_attention)
        documented = (F.scaled_dot_product_attention.__doc__ or "").split(":", 1)[0]  # it is no Python function
        definition = ast.parse(f"def {documented}: ...").body[0]
        assert isinstance(definition, ast.FunctionDef)
        assert list(ours) == [x.arg for x in definition.args.args]
        defaults = [x.default for x in ours.values() if x.default is not inspect.Parameter.empty]
        assert defaults == [ast.literal_eval(x) for x in definition.args.defaults]
        x = torch.zeros(5, 11)
        for function in (F.scaled_dot_product_attention, PACKAGES[package].scaled_dot_product_attention):
            function(x, x, x, None, 0.0, False, scale=1.0, enable_gqa=False)
            with pytest.raises(TypeError, match="positional arguments"):
                function(x, x, x, None, 0.0, False, 1.0)

    def test_an_attention_is_traced_with_the_arguments_of_its_call(self) -> None:
        ours, theirs = (parameters(x) for x in (scratch.trace_attention, nn.MultiheadAttention.forward))
        del ours["module"], theirs["self"], theirs["average_attn_weights"]
        assert [(name, x.kind, x.default) for name, x in ours.items()] == [
            (name, x.kind, x.default) for name, x in theirs.items()
        ]

    @pytest.mark.parametrize("package", PACKAGES)
    def test_generate_square_subsequent_mask_has_torchs_signature(self, package: str) -> None:
        ours = parameters(PACKAGES[package].Transformer.generate_square_subsequent_mask)
        theirs = parameters(nn.Transformer.generate_square_subsequent_mask)
        assert [(name, x.default) for name, x in ours.items()] == [(name, x.default) for name, x in theirs.items()]
        assert isinstance(
            inspect.getattr_static(PACKAGES[package].Transformer, "generate_square_subsequent_mask"), staticmethod
        )


MHA_VARIANTS: list[dict[str, Any]] = [
    {"embed_dim": 33, "num_heads": 3, "bias": bias, "add_bias_kv": bias_kv, "add_zero_attn": zero_attn, **widths}
    for bias, bias_kv, zero_attn, widths in itertools.product(
        (True, False), (True, False), (True, False), ({}, {"kdim": 19}, {"vdim": 23}, {"kdim": 19, "vdim": 23})
    )
]
LAYER_OPTIONS: list[dict[str, Any]] = [
    {},
    {"bias": False},
    {"norm_first": True, "batch_first": True},
    {"activation": "gelu", "layer_norm_eps": 1e-3, "dropout": 0.5},
    {"dtype": torch.float64},
]
SIZES: dict[str, Any] = {"num_encoder_layers": 2, "num_decoder_layers": 3}
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *(("MultiheadAttention", arguments) for arguments in MHA_VARIANTS),
    ("MultiheadAttention", {"embed_dim": 33, "num_heads": 3, "dropout": 0.3, "batch_first": True}),
    ("MultiheadAttention", {"embed_dim": 33, "num_heads": 3, "dtype": torch.bfloat16, "device": "cpu"}),
    *(("TransformerEncoderLayer", {**LAYER, **options}) for options in LAYER_OPTIONS),
    *(("TransformerDecoderLayer", {**LAYER, **options}) for options in LAYER_OPTIONS),
    ("TransformerEncoder", {"num_layers": 2, "norm": nn.LayerNorm(33)}),
    ("TransformerEncoder", {"num_layers": 1, "enable_nested_tensor": False, "mask_check": False}),
    ("TransformerDecoder", {"num_layers": 3, "norm": nn.LayerNorm(33)}),
    ("TransformerDecoder", {"num_layers": 1}),
    *(("Transformer", {**LAYER, **SIZES, **options}) for options in LAYER_OPTIONS),
    ("Transformer", {**LAYER, **SIZES, "custom_encoder": nn.Linear(33, 33)}),
    ("Transformer", {**LAYER, **SIZES, "custom_decoder": nn.Linear(33, 33)}),
]


def name_of_variant(variant: tuple[str, dict[str, Any]]) -> str:
    component, arguments = variant
    return component + "-" + "-".join(f"{name}={x}" for name, x in arguments.items() if name not in LAYER)


def build_after_seed(package: Any, variant: tuple[str, dict[str, Any]]) -> nn.Module:
    torch.manual_seed(7)
    module = construct(package, *variant)
    assert isinstance(module, nn.Module)
    return module


# The registers of nn.Module, and what says that torch.nn may nest its input, where scratch never does.
INSIDE_TORCH = vars(nn.Module()).keys() | {"use_nested_tensor"}


@pytest.mark.parametrize("variant", VARIANTS, ids=name_of_variant)
@pytest.mark.parametrize("package", PACKAGES)
class TestParameters:
    def test_same_seed_gives_the_same_parameters_to_the_last_bit(self, package: str, variant: Any) -> None:
        expected = build_after_seed(TORCH, variant)
        random_state = torch.get_rng_state()
        actual = build_after_seed(PACKAGES[package], variant)
        assert torch.equal(torch.get_rng_state(), random_state)
        names = [name for name, _ in expected.named_parameters()]
        assert [name for name, _ in actual.named_parameters()] == names
        for name in names:
            ours, theirs = actual.get_parameter(name), expected.get_parameter(name)
            assert (ours.dtype, ours.device) == (theirs.dtype, theirs.device)
            assert torch.equal(ours, theirs), name

    def test_state_dicts_load_both_ways(self, package: str, variant: Any) -> None:
        ours, theirs = build_after_seed(PACKAGES[package], variant), construct(TORCH, *variant)
        assert list(ours.state_dict()) == list(theirs.state_dict())
        theirs.load_state_dict(ours.state_dict(), strict=True)
        ours.load_state_dict(theirs.state_dict(), strict=True)

    def test_attributes_are_torchs(self, package: str, variant: Any) -> None:
        ours, theirs = build_after_seed(PACKAGES[package], variant), build_after_seed(TORCH, variant)
        for path, module in theirs.named_modules():
            twin = ours.get_submodule(path)
            for name in sorted(vars(module).keys() - INSIDE_TORCH):
                assert getattr(twin, name) == getattr(module, name), f"{path}.{name}"

    def test_absent_parameters_are_registered_as_none(self, package: str, variant: Any) -> None:
        ours, theirs = build_after_seed(PACKAGES[package], variant), build_after_seed(TORCH, variant)
        for path, module in theirs.named_modules():
            absent = {name for name, x in module._parameters.items() if x is None}
            twins = ours.get_submodule(path)._parameters
            assert {name for name, x in twins.items() if x is None} - {"bias_k", "bias_v"} == absent, path

    def test_modules_stand_where_torchs_do(self, package: str, variant: Any) -> None:
        ours, theirs = build_after_seed(PACKAGES[package], variant), build_after_seed(TORCH, variant)
        for (path, module), (torchs_path, torchs) in zip(ours.named_modules(), theirs.named_modules(), strict=True):
            assert path == torchs_path
            kinds = {type(x).__name__.removeprefix("NonDynamicallyQuantizable") for x in (module, torchs)}
            assert len(kinds) == 1, path


class TestKinds:
    @pytest.mark.parametrize("component", CLASSES)
    def test_builtin_is_a_torch_nn_and_scratch_is_not(self, component: str) -> None:
        assert issubclass(getattr(builtin, component), getattr(nn, component))
        assert not issubclass(getattr(scratch, component), getattr(nn, component))
        assert issubclass(getattr(scratch, component), nn.Module)

    @pytest.mark.parametrize("package", PACKAGES)
    def test_a_model_is_made_of_its_packages_own_parts(self, package: str) -> None:
        parts = PACKAGES[package]
        model = parts.Transformer(33, 3, 1, 1, 13)
        assert type(model.encoder) is parts.TransformerEncoder
        assert type(model.decoder) is parts.TransformerDecoder
        assert type(model.encoder.layers[0]) is parts.TransformerEncoderLayer
        assert type(model.decoder.layers[0]) is parts.TransformerDecoderLayer

    def test_checkpoints_of_torch_load_into_models_with_head_sizes_that_say_the_same(self) -> None:
        theirs = nn.MultiheadAttention(33, 3)
        scratch.MultiheadAttention(33, 3, qk_head_dim=11, v_head_dim=11).load_state_dict(theirs.state_dict())


# --- the twins -------------------------------------------------------------------------------------------------------

INSIDE_KERNELS = "a step inside torch's own function, which has no door there"
# The folders validation/ and task/ serve both packages.
SCRATCH_ONLY_FILES = {
    "functional.py": INSIDE_KERNELS,
    "paths.py": INSIDE_KERNELS,
    "rounding.py": INSIDE_KERNELS,
    "score_functions.py": "torch's flex attention takes the same functions",
    "tiling.py": INSIDE_KERNELS,
    "documentation.py": "it attaches to builtin what both say",
    "positional.py": "torch.nn has no positional encoding: both use this one",
    "caches.py": "torch.nn has no cache: builtin decodes by recomputation",
    "decoding.py": "torch.nn has no decoding: both use this one",
}
SCRATCH_ONLY_NAMES = {
    "attention.AttentionCache": "torch.nn has no cache",
    "attention.MultiheadAttention.merge_masks": "builtin inherits torch.nn's own",
    "attention.InProjection": INSIDE_KERNELS,
    "attention.attend": INSIDE_KERNELS,
    "attention.attend_with_weights": INSIDE_KERNELS,
    "attention.project": INSIDE_KERNELS,
    "attention.resolve_masks": INSIDE_KERNELS,
    "layers.DecoderLayerCache": "torch.nn has no cache",
    "layers.activation_function": "torch.nn looks the name up itself, in a private function",
    "grouped.grouped_scores": INSIDE_KERNELS,
    "grouped.with_sink_key": "builtin makes a mask of it for the fused function",
    "grouped.who_may_attend": "builtin uses the one of scratch: torch.nn takes masks and builds none",
    "norms.RMSNorm.extra_repr": "builtin inherits it from torch.nn",
    "norms.RMSNorm.reset_parameters": "builtin inherits it from torch.nn",
    "transformer.is_causal_mask": "torch.nn finds out itself, in a private function",
}
# What builtin hands on as torch has it, by the module it comes from: scratch has a class of its own, held to torch's.
TORCHS_OWN = {
    "block_masks.BlockMask": flex_attention,
    "flex.AuxOutput": flex_attention,
    "flex.AuxRequest": flex_attention,
    "flex.BlockMask": flex_attention,
    "flex.noop_mask": flex_attention,
    "mask_functions.noop_mask": flex_attention,
    "varlen.AuxRequest": varlen,
}


def modules_of(package: ModuleType) -> dict[str, ModuleType]:
    """Import every file of a package but the command lines, the tests, and what needs Triton."""
    files = sorted(Path(package.__file__ or "").parent.glob("*.py"))
    names = [file.stem for file in files if file.stem not in ("__init__", "__main__", "triton_attention")]
    return {name: importlib.import_module(f"{package.__name__}.{name}") for name in names}


SCRATCH_MODULES, BUILTIN_MODULES = modules_of(scratch), modules_of(builtin)
SHARED_MODULES = [name for name in SCRATCH_MODULES if name in BUILTIN_MODULES]


def public_members(owner: str, thing: Any) -> Iterator[tuple[str, Any]]:
    """Give the public functions and methods under their dotted names."""
    if inspect.isclass(thing):
        yield owner, thing
        ours = [base for base in reversed(thing.__mro__) if base.__module__.split(".")[0] in PACKAGES]
        for name, member in {name: x for base in ours for name, x in vars(base).items()}.items():
            function = getattr(member, "__func__", member)
            if inspect.isfunction(function) and not name.startswith("_"):
                yield f"{owner}.{name}", function
    elif inspect.isfunction(thing):
        yield owner, thing


def public_things(modules: dict[str, ModuleType]) -> dict[str, Any]:
    """Give everything public, functions, classes and methods, in order, where it is written."""
    others = {module.__name__ for module in modules.values()}
    return {
        dotted: thing
        for module_name, module in modules.items()
        for name in getattr(module, "__all__", ())
        if getattr(getattr(module, name), "__module__", "") not in others - {module.__name__}
        for dotted, thing in public_members(f"{module_name}.{name}", getattr(module, name))
    }


def is_or_belongs_to(name: str, owners: Iterable[str]) -> bool:
    return any(name == owner or name.startswith(owner + ".") for owner in owners)


SCRATCH_THINGS = public_things(SCRATCH_MODULES)
BUILTIN_THINGS = {
    name: thing for name, thing in public_things(BUILTIN_MODULES).items() if not is_or_belongs_to(name, TORCHS_OWN)
}
TWINS = [
    name
    for name in SCRATCH_THINGS
    if name.split(".")[0] in SHARED_MODULES and not is_or_belongs_to(name, (*SCRATCH_ONLY_NAMES, *TORCHS_OWN))
]


def first_sentence(thing: Any) -> str:
    return (inspect.getdoc(thing) or "").split("\n\n")[0]


def section(thing: Any, title: str) -> str:
    """Give the body of one section of a docstring; "" if there is none."""
    found = re.search(rf"^{re.escape(title)}:(.*?)(?=^\S|\Z)", inspect.getdoc(thing) or "", re.MULTILINE | re.DOTALL)
    return found.group(1).rstrip() if found else ""


def constructor(thing: Any) -> Any:
    """Give what a class is built by, and functions as they are."""
    if inspect.isclass(thing):
        return thing.__new__ if issubclass(thing, tuple) else thing.__init__
    return thing


def signature(thing: Any) -> list[tuple[str, Any, Any, str]]:
    # A class of builtin stands for its twin.
    return [
        (name, x.kind, x.default, str(x.annotation).replace("builtin.", "scratch."))
        for name, x in parameters(constructor(thing)).items()
    ]


class TestTwins:
    def test_files_are_the_same(self) -> None:
        assert set(BUILTIN_MODULES) == set(SCRATCH_MODULES) - {file.removesuffix(".py") for file in SCRATCH_ONLY_FILES}
        for package in (scratch, builtin):
            assert (Path(package.__file__ or "").parent / "py.typed").exists()

    def test_the_packages_offer_the_same_names_in_the_same_order(self) -> None:
        assert builtin.__all__ == scratch.__all__

    @pytest.mark.parametrize("module", SHARED_MODULES)
    def test_files_offer_the_same_names_in_the_same_order(self, module: str) -> None:
        ours, theirs = SCRATCH_MODULES[module].__all__, BUILTIN_MODULES[module].__all__
        assert theirs == [name for name in ours if f"{module}.{name}" not in SCRATCH_ONLY_NAMES]

    def test_names_and_methods_have_their_twins(self) -> None:
        assert sorted(BUILTIN_THINGS) == sorted(TWINS)

    @pytest.mark.parametrize("name", TWINS)
    def test_signatures_are_equal_annotations_included(self, name: str) -> None:
        assert signature(BUILTIN_THINGS[name]) == signature(SCRATCH_THINGS[name])

    @pytest.mark.parametrize("name", TWINS)
    def test_docstrings_share_the_first_sentence_and_the_arguments(self, name: str) -> None:
        ours, theirs = SCRATCH_THINGS[name], BUILTIN_THINGS[name]
        assert first_sentence(theirs) == first_sentence(ours)
        assert section(theirs, "Args") == section(ours, "Args")

    def test_every_exception_is_still_one(self) -> None:
        assert [file for file in SCRATCH_ONLY_FILES if file.removesuffix(".py") not in SCRATCH_MODULES] == []
        missing = [name for name in SCRATCH_ONLY_NAMES if name not in SCRATCH_THINGS or name in BUILTIN_THINGS]
        assert missing == []


MIRRORED_OF_FLEX = (
    "flex.AuxOutput",
    "flex.AuxRequest",
    "flex.BlockMask",
    "flex.BlockMask.as_tuple",
    "flex.BlockMask.from_kv_blocks",
    "flex.BlockMask.numel",
    "flex.BlockMask.sparsity",
    "flex.BlockMask.to",
    "flex.BlockMask.to_dense",
    "flex.BlockMask.to_string",
    "flex.and_masks",
    "flex.create_block_mask",
    "flex.create_mask",
    "flex.flex_attention",
    "flex.noop_mask",
    "flex.or_masks",
    "varlen.AuxRequest",
    "varlen.varlen_attn",
)


def default_of(parameter: inspect.Parameter) -> Any:
    return getattr(parameter.default, "__name__", parameter.default)


class TestBesideTorchNN:
    @pytest.mark.parametrize("name", MIRRORED_OF_FLEX)
    @pytest.mark.parametrize("package", PACKAGES)
    def test_what_torch_has_beside_torch_nn_keeps_its_signature_and_its_defaults(self, package: str, name: str) -> None:
        """A newer torch may have more, and an older one less: in the same order, each with its default."""
        module, _, path = name.partition(".")
        owner = {"flex": flex_attention, "varlen": varlen}[module]
        ours, theirs = (
            parameters(constructor(operator.attrgetter(path)(x)))
            for x in (importlib.import_module(f"{package}.{module}"), owner)
        )
        shared = [x for x in ours.values() if x.name in theirs]
        assert [(x.name, x.kind) for x in shared] == [(x.name, x.kind) for x in theirs.values()]
        for x in shared:
            assert default_of(x) == default_of(theirs[x.name]) or (IS_OLD and default_of(theirs[x.name]) == "_empty")
        added = [x for x in ours.values() if x.name not in theirs]
        assert not added or IS_OLD
        assert all(x.default is not inspect.Parameter.empty for x in added)

    @pytest.mark.parametrize("name", TORCHS_OWN)
    def test_builtin_hands_on_torchs_own(self, name: str) -> None:
        module, _, path = name.partition(".")
        assert getattr(BUILTIN_MODULES[module], path) is getattr(TORCHS_OWN[name], path)

    def test_every_public_attribute_of_torchs_block_mask_is_there(self) -> None:
        mask = flex_attention.create_block_mask(scratch.score_functions.causal(), 2, 3, 5, 5, "cpu", 2)
        names = {name for name in dir(mask) if not name.startswith(("_", "dq_"))}
        assert {name for name in names if not hasattr(MAY_ATTEND_BLOCKS, name)} == set()


# --- by hand ---------------------------------------------------------------------------------------------------------

TORCH_ATTENTION = {
    *CLASSES,
    "scaled_dot_product_attention",
    "multi_head_attention_forward",
    "_native_multi_head_attention",
    "_transformer_encoder_layer_fwd",
    "create_block_mask",
    "create_mask",
    "flex_attention",
    "varlen_attn",
    "RMSNorm",
    "rms_norm",
    "generate_square_subsequent_mask",
}
NAMED_IN_SCRATCH = {("recording.py", "MultiheadAttention"): "maps are recorded of torch.nn's own modules too"}


class TorchAttentionCalledError(Exception):
    """scratch has called what it is to be written without."""


class NoTorchAttention(TorchFunctionMode):
    """Raise as soon as one of torch's attention functions is called, by whatever name it was imported."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__ in TORCH_ATTENTION:
            raise TorchAttentionCalledError(func.__name__)
        return func(*args, **(kwargs or {}))


def refuse(*arguments: object, **keywords: object) -> None:
    raise TorchAttentionCalledError


@pytest.fixture
def no_torch_attention(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in (*CLASSES, "RMSNorm"):
        monkeypatch.setattr(getattr(nn, name), "__init__", refuse)
        monkeypatch.setattr(getattr(nn, name), "forward", refuse)
    monkeypatch.setattr(nn.Transformer, "generate_square_subsequent_mask", refuse)
    for owner in (F, torch, flex_attention, varlen):
        for name in TORCH_ATTENTION & vars(owner).keys():
            monkeypatch.setattr(owner, name, refuse)
    with NoTorchAttention():
        yield


SIZES_OF: dict[str, Any] = dict.fromkeys(CLASSES, LAYER) | {"MultiheadAttention": {"embed_dim": 33, "num_heads": 3}}


def call_class_of_scratch(name: str) -> Any:
    """Build and call one of the classes of scratch, backwards too."""
    x, memory = torch.randn(5, 2, 33, requires_grad=True), torch.randn(7, 2, 33)
    layer = getattr(scratch, f"{name}Layer", None)
    module = getattr(scratch, name)(layer(**LAYER), 2) if layer else getattr(scratch, name)(**SIZES_OF[name])
    inputs = {"MultiheadAttention": (x, memory, memory), "Transformer": (memory, x)}.get(name, (x, memory))
    output = module(x) if "Encoder" in name else module(*inputs)
    (output[0] if isinstance(output, tuple) else output).sum().backward()
    assert x.grad is not None
    return output


TOKENS = (torch.ones(5, 2, 33), torch.ones(7, 2, 33), torch.ones(7, 2, 33))
HEADS, IDS = torch.ones(2, 3, 5, 11), torch.tensor([[3, 4, 0]])
MAY_ATTEND = torch.ones(5, 5, dtype=torch.bool).tril()
SCALINGS = (
    scratch.LinearScaling(2.0),
    scratch.NTKScaling(2.0),
    scratch.YaRNScaling(2.0, 64),
    scratch.Llama3Scaling(2.0, 64),
)
MAY_ATTEND_BLOCKS = scratch.create_block_mask(scratch.score_functions.causal(), 2, 3, 5, 5, "cpu", 2)
PACKED, CU_SEQ = torch.ones(5, 3, 11), torch.tensor([0, 2, 5], dtype=torch.int32)
SCORE_FUNCTIONS: list[Callable[[], Any]] = [
    lambda: scratch.score_functions.causal() & scratch.score_functions.sliding_window(2),
    lambda: scratch.score_functions.document(IDS) | scratch.score_functions.prefix(2),
    lambda: scratch.score_functions.alibi(scratch.score_functions.alibi_slopes(3))(HEADS, *[torch.tensor(0)] * 4),
    lambda: scratch.score_functions.soft_cap(2.0)(HEADS, *[torch.tensor(0)] * 4),
    lambda: scratch.score_functions.relative_bias(torch.ones(3, 5))(HEADS, *[torch.tensor(0)] * 4),
    lambda: scratch.score_functions.add_sinks(HEADS, HEADS[..., 0], torch.zeros(3)),
]
CALLS_BY_HAND: dict[str, Callable[[], Any]] = {
    **{name: lambda name=name: call_class_of_scratch(name) for name in CLASSES},  # type: ignore[misc]
    "Tracer": lambda: scratch.Tracer().trace(nn.Sequential(scratch.TransformerEncoderLayer(**LAYER))),
    "rms_norm": lambda: scratch.rms_norm(torch.ones(2, 33), [33]),
    "scaled_dot_product_attention": lambda: scratch.scaled_dot_product_attention(HEADS, HEADS, HEADS, is_causal=True),
    "masks": lambda: [
        scratch.masks.causal(5, 7),
        scratch.masks.sliding_window(5, window=2),
        scratch.masks.from_lengths(torch.tensor([2, 3])),
        scratch.masks.from_token_ids(IDS, pad_id=0),
        scratch.masks.to_module_mask(MAY_ATTEND),
        scratch.masks.from_module_mask(MAY_ATTEND),
        scratch.masks.from_score_bias(scratch.masks.to_score_bias(MAY_ATTEND)),
        scratch.Transformer.generate_square_subsequent_mask(5),
    ],
    **{type(scaling).__name__: lambda scaling=scaling: scaling(6, 100.0) for scaling in SCALINGS},  # type: ignore[misc]
    "DecoderOnlyLayer": lambda: scratch.DecoderOnlyLayer(12, 3, 16)(torch.ones(2, 5, 12)),
    "DecoderOnlyTransformer": lambda: call_language_model(scratch.DecoderOnlyTransformer(5, 12, 3, 1, 16)),
    "GroupedQueryAttention": lambda: call_grouped(scratch.GroupedQueryAttention(33, 3, 1, soft_cap=2.0, sinks=True)),
    "AuxRequest": lambda: scratch.AuxRequest(lse=True),
    "BlockMask": lambda: str(MAY_ATTEND_BLOCKS.to("cpu")[0]),
    "create_block_mask": lambda: scratch.create_block_mask(scratch.score_functions.causal(), 2, 3, 5, 5, "cpu", 2),
    "flex_attention": lambda: scratch.flex_attention(HEADS, HEADS, HEADS, None, MAY_ATTEND_BLOCKS, return_lse=True),
    "score_functions": lambda: [make() for make in SCORE_FUNCTIONS],
    "varlen_attn": lambda: scratch.varlen_attn(PACKED, PACKED, PACKED, CU_SEQ, CU_SEQ, 3, 3, window_size=(1, 0)),
    "RMSNorm": lambda: scratch.RMSNorm(33)(torch.ones(2, 33)),
    "RotaryEmbedding": lambda: scratch.RotaryEmbedding(6)(torch.ones(2, 6)),
    "SwiGLU": lambda: scratch.SwiGLU(12, 16)(torch.ones(2, 12)),
    "adjacent_to_halves": lambda: scratch.adjacent_to_halves(torch.ones(6, 33), 6),
    "halves_to_adjacent": lambda: scratch.halves_to_adjacent(torch.ones(6, 33), 6),
    "record_attention": lambda: record(scratch.MultiheadAttention(33, 3)),
    "AttentionMaps": lambda: None,  # a record of tensors
    "PositionalEncoding": lambda: scratch.PositionalEncoding(33)(torch.ones(2, 5, 33)),
    "Seq2SeqTransformer": lambda: call_seq2seq(scratch.Seq2SeqTransformer(5, 7, 33, 3, 1, 1)),
    "sinusoidal_encoding": lambda: scratch.sinusoidal_encoding(5, 33),
    "trace_attention": lambda: scratch.trace_attention(scratch.MultiheadAttention(33, 3), *TOKENS),
}


def call_seq2seq(model: Any) -> Any:
    """Train a step, and translate in both ways."""
    model(IDS, IDS).sum().backward()
    return [model.generate(IDS, max_len=3, beam_size=beam_size) for beam_size in (1, 2)]


def call_language_model(model: Any) -> Any:
    model(IDS).sum().backward()
    return [model.generate(IDS, max_len=3, temperature=temperature) for temperature in (0.0, 1.0)]


def call_grouped(attention: nn.Module) -> Any:
    x = torch.ones(2, 5, 33, requires_grad=True)
    attention(x).sum().backward()
    return attention(x, cache=KeyValueCache(window=3))


def record(attention: nn.Module) -> Any:
    with scratch.record_attention(attention) as maps:
        attention(*TOKENS, need_weights=False)
    return maps


class TestByHand:
    def test_everything_that_scratch_offers_is_called_below(self) -> None:
        assert sorted(CALLS_BY_HAND) == sorted(scratch.__all__)

    @pytest.mark.parametrize("name", CALLS_BY_HAND)
    @pytest.mark.usefixtures("no_torch_attention")
    def test_scratch_runs_while_torchs_attention_raises(self, name: str) -> None:
        CALLS_BY_HAND[name]()

    @pytest.mark.parametrize("name", CLASSES)
    @pytest.mark.usefixtures("no_torch_attention")
    def test_builtin_does_not_run_then(self, name: str) -> None:
        build = {"num_layers": 1} if name in ("TransformerEncoder", "TransformerDecoder") else SIZES_OF[name]
        with pytest.raises(TorchAttentionCalledError):
            construct(builtin, name, build)

    def test_functions_imported_under_another_name_are_caught_too(self) -> None:
        parameters: Any = (None, None, None, None, False, 0.0, torch.eye(33), None)
        for call in (
            partial(F.scaled_dot_product_attention, HEADS, HEADS, HEADS),
            partial(F.multi_head_attention_forward, *TOKENS, 33, 3, *parameters),
        ):
            with NoTorchAttention(), pytest.raises(TorchAttentionCalledError):
                call()

    def test_the_source_of_scratch_names_none_of_torchs_attention(self) -> None:
        found = {
            (file.name, name)
            for file in sorted((ROOT / "scratch").glob("*.py"))
            for name in torch_attention_named_in(ast.parse(file.read_text(encoding="utf-8")))
        }
        assert found == set(NAMED_IN_SCRATCH)


def torch_attention_named_in(tree: ast.Module) -> Iterator[str]:
    """Give names of torch's attention that a file imports from torch or reads off torch, nn or F."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            yield from (alias.name for alias in node.names if alias.name in TORCH_ATTENTION)
        if isinstance(node, ast.Attribute) and node.attr in TORCH_ATTENTION:
            root: ast.AST = node.value
            while isinstance(root, ast.Attribute):
                root = root.value
            if isinstance(root, ast.Name) and root.id in ("torch", "nn", "F"):
                yield node.attr


# --- the shape of the source -----------------------------------------------------------------------------------------


def lines_of_code(function: ast.FunctionDef, source: list[str]) -> int:
    """Count the lines of a body without docstring, comments and blank lines."""
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    lines = {line for node in body for line in range(node.lineno, (node.end_lineno or 0) + 1)}
    return sum(bool(text := source[line - 1].strip()) and not text.startswith("#") for line in lines)


def sizes_of_functions() -> dict[str, int]:
    sizes = {}
    for room in ("scratch", "builtin"):
        for file in sorted((ROOT / room).glob("*.py")):
            text = file.read_text(encoding="utf-8")
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.FunctionDef):
                    sizes[f"{room}/{file.name}:{node.lineno} {node.name}"] = lines_of_code(node, text.splitlines())
    return sizes


TORCHS = "the signature is torch's, and is held to it above"
OPTIONS = "a module takes its sizes and options one by one, as those of torch.nn do"
COMMAND = "one for each option of the command line"
MORE_THAN_SIX_PARAMETERS = {
    "MultiheadAttention.__init__": TORCHS,
    "Transformer.__init__": TORCHS,
    "TransformerEncoderLayer.__init__": TORCHS,
    "TransformerDecoderLayer.__init__": TORCHS,
    "MultiheadAttention.forward": TORCHS,
    "TransformerDecoderLayer.forward": TORCHS,
    "TransformerDecoder.forward": TORCHS,
    "Transformer.forward": TORCHS,
    "scaled_dot_product_attention": TORCHS,
    "flex_attention": TORCHS,
    "create_block_mask": TORCHS,
    "BlockMask.__init__": TORCHS,
    "BlockMask.from_kv_blocks": TORCHS,
    "varlen_attn": TORCHS,
    "trace_attention": TORCHS,
    "GroupedQueryAttention.__init__": OPTIONS,
    "DecoderOnlyLayer.__init__": OPTIONS,
    "DecoderOnlyTransformer.__init__": OPTIONS,
    "Seq2SeqTransformer.__init__": OPTIONS,
    "train": COMMAND,
    "translate": COMMAND,
}


def functions_of(owner: ast.AST, scope: str = "") -> Iterator[tuple[str, ast.FunctionDef]]:
    """Give every function, method and nested function under its dotted name, but those that Triton compiles."""
    for node in ast.iter_child_nodes(owner):
        inside = f"{scope}{node.name}." if isinstance(node, ast.ClassDef | ast.FunctionDef) else scope
        if isinstance(node, ast.FunctionDef):
            if "triton.jit" in map(ast.unparse, node.decorator_list):
                continue
            yield f"{scope}{node.name}", node
        yield from functions_of(node, inside)


def parameter_count(function: ast.FunctionDef) -> int:
    x = function.args
    names = [y.arg for y in (*x.posonlyargs, *x.args, *x.kwonlyargs, x.vararg, x.kwarg) if y is not None]
    return len(set(names) - {"self", "cls", "ctx"})


class TestSizes:
    def test_no_function_has_more_than_six_parameters_but_those_that_are_listed(self) -> None:
        files = [file for room in ("scratch", "builtin") for file in (ROOT / room).rglob("*.py")]
        functions = [x for file in files for x in functions_of(ast.parse(file.read_text(encoding="utf-8")))]
        assert len(functions) > 500
        assert {name for name, x in functions if parameter_count(x) > 6} == set(MORE_THAN_SIX_PARAMETERS)

    def test_half_of_the_functions_have_fewer_than_ten_lines(self) -> None:
        sizes = sorted(sizes_of_functions().values())
        assert sizes[len(sizes) // 2] < 10

    def test_no_function_has_more_than_thirty_lines(self) -> None:
        assert {name: size for name, size in sizes_of_functions().items() if size > 30} == {}

    def test_no_forward_has_more_than_twenty_lines(self) -> None:
        forwards = {name: size for name, size in sizes_of_functions().items() if name.endswith(" forward")}
        assert len(forwards) >= 12
        assert {name: size for name, size in forwards.items() if size > 20} == {}


DOCUMENTED = {
    f"{room}.{name}": thing
    for room, things in (("scratch", SCRATCH_THINGS), ("builtin", BUILTIN_THINGS))
    for name, thing in things.items()
    if not name.startswith("validation.")
}
MIRRORED = [
    f"{room}.{name}"
    for room in PACKAGES
    for name in SCRATCH_THINGS
    if name.rpartition(".")[2] in (*CLASSES, "RMSNorm", "rms_norm", "scaled_dot_product_attention")
]


def documented_arguments(thing: Any) -> list[str]:
    return re.findall(r"^ {4}\*{0,2}(\w+):", section(thing, "Args"), re.MULTILINE)


def may_be_brief(name: str, thing: Any) -> bool:
    """Methods that torch does not have may do without sections."""
    return name.count(".") > 2 and name.split(".", 1)[1] not in TWINS and "Args:" not in (inspect.getdoc(thing) or "")


def calls_validation(thing: Any) -> bool:
    if dataclasses.is_dataclass(thing):  # its __init__ has no source
        function = vars(thing).get("__post_init__")
    else:
        function = vars(thing).get("__init__") if inspect.isclass(thing) else thing
    return function is not None and "validation.check" in inspect.getsource(function)


@pytest.mark.parametrize("name", DOCUMENTED)
def test_a_docstring_begins_with_one_sentence_and_says_what_is_given_comes_back_and_is_raised(name: str) -> None:
    thing = DOCUMENTED[name]
    assert re.fullmatch(r"[A-Z\"`][^\n]*(\n[^\n]+)?[.?]", first_sentence(thing))
    if calls_validation(thing):
        assert section(thing, "Raises")
    if may_be_brief(name, thing):
        return
    given = [x for x in parameters(constructor(thing)) if x not in ("self", "cls", "_cls")]
    assert getattr(thing, "_is_protocol", False) or documented_arguments(thing) == given
    if not inspect.isclass(thing) and inspect.signature(thing).return_annotation not in (None, "None"):
        assert section(thing, "Returns") or section(thing, "Yields")


@pytest.mark.parametrize("name", MIRRORED)
def test_what_mirrors_torch_says_how_and_names_its_source(name: str) -> None:
    documentation = inspect.getdoc(DOCUMENTED[name]) or ""
    assert "\nIn torch.nn: ``" in documentation
    assert "\nSource: " in documentation
    assert "https://docs.pytorch.org/docs/stable/generated/" in documentation
    assert "\n>>> " in documentation


def test_no_line_of_a_docstring_only_fills_in_a_form() -> None:
    rooms = ("scratch", "builtin", "equivalence_tests", "benchmarks")
    files = [file for room in rooms for file in (ROOT / room).rglob("*.py")]
    lines = [f"{file.relative_to(ROOT)}: {line}" for file in files for line in file.read_text("utf-8").splitlines()]
    assert [line for line in lines if re.search(r"In torch\.nn: nothing|: Likewise[.,:]", line)] == []
