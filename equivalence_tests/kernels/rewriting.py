"""What torch's compiler makes of a function before it generates code: this takes no C++ compiler and little time."""

import shutil
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._triton import has_triton

from equivalence_tests.kernels.situations import Inputs

__all__ = ["has_compiler", "rewritten", "rewritten_only"]


def has_compiler(device: str) -> bool:
    """Say whether this machine can compile for a device: for the CPU a C++ compiler, for others Triton."""
    if device == "cpu":
        return any(shutil.which(name) for name in ("g++", "clang++", "c++"))
    return has_triton()


def rewritten(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
    """Be a backend of ``torch.compile`` that rewrites as Inductor does, and runs the rewritten graph as it stands."""
    from torch._functorch._aot_autograd.utils import make_boxed_func
    from torch._inductor.compile_fx import compile_fx

    def as_it_stands(graph: torch.fx.GraphModule, inputs: Any, **options: Any) -> Any:
        del inputs, options
        return make_boxed_func(graph.forward)

    return compile_fx(graph, inputs, inner_compile=as_it_stands)


def rewritten_only(form: Callable[..., Tensor]) -> Callable[[Inputs], Tensor]:
    """Run a hand-written form on (batch, tokens, heads, features) after the compiler has rewritten it."""

    def call(inputs: Inputs) -> Tensor:
        torch._dynamo.reset()
        tensors = [x.transpose(1, 2).contiguous() for x in (inputs.q, inputs.k, inputs.v)]
        tensors += [] if inputs.mask is None else [inputs.mask]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.compile(form, backend=rewritten, dynamic=False)(*tensors)

    return call
