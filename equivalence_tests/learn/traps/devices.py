"""What shows on a GPU alone: which kernel computes, and whether it computes the same twice."""

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from equivalence_tests.learn.excerpts import Place
from equivalence_tests.learn.traps.entry import Severity, Trap
from scratch import sdpa, tiling

__all__ = ["TRAPS"]


class GqaFallsBack(Trap):
    """enable_gqa=True in float32 silently takes the slow kernel."""

    number = 70
    name = "gqa_falls_back"
    severity = Severity.SLOW
    concerns = ("enable_gqa",)
    expects = "Fewer key heads mean less work: enable_gqa=True is faster than repeating the keys."
    happens = (
        "Here only the fast kernels are allowed, and the call ends in an error: none of them supports it. Without "
        "that restriction the MATH kernel computes it, which writes out all scores, without a warning. One "
        "measurement on an RTX 5090 has 23 ms against 7.5 ms with repeated keys."
    )
    why = (
        "FLASH groups heads but only takes half precision; the kernels that take float32 want as many key heads as "
        "query heads. By hand the keys are repeated first."
    )
    places = (Place(sdpa.scaled_dot_product_attention, "x.repeat_interleave"),)
    instead = "Repeat the keys and values in float32, or compute in bfloat16."
    issues = ("pytorch/pytorch#181528", "pytorch/pytorch#154363")
    needs = "a CUDA device"

    def wrong(self) -> Tensor:
        fast = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION]
        query = torch.randn(1, 8, 2048, 64, device="cuda")
        key, value = torch.randn(2, 1, 2, 2048, 64, device="cuda")
        with sdpa_kernel(fast):
            return F.scaled_dot_product_attention(query, key, value, enable_gqa=True)

    def right(self) -> Tensor:
        fast = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION]
        query = torch.randn(1, 8, 2048, 64, device="cuda")
        key, value = torch.randn(2, 1, 2, 2048, 64, device="cuda").repeat_interleave(4, dim=2)
        with sdpa_kernel(fast):
            return F.scaled_dot_product_attention(query, key, value)


class DeterministicByKernel(Trap):
    """Whether two runs give the same gradient depends on the kernel."""

    number = 76
    name = "deterministic_by_kernel"
    severity = Severity.SURPRISING
    concerns = ("scaled_dot_product_attention.query",)
    expects = "With the same seed and the same inputs, two backward passes give the same gradients."
    happens = (
        "The outputs are the same, but the gradients may differ in the last bits. With the MATH kernel they are the "
        "same. With torch.use_deterministic_algorithms(True), FLASH and EFFICIENT take a slower path that gives the "
        "same result each time, and CUDNN is not used; with warn_only=True nothing changes."
    )
    why = (
        "Many blocks on the GPU add to the gradient of one query, in the order in which they finish. By hand, the "
        "tiles are added one after another."
    )
    places = (Place(tiling._gradients, "grad_q[place] ="),)
    instead = "torch.use_deterministic_algorithms(True), where a run must be reproducible to the last bit."
    issues = ("pytorch/pytorch#178587", "pytorch/pytorch#182551")
    needs = "a CUDA device"

    def wrong(self) -> None:
        x = torch.randn(1, 8, 4096, 64, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        first, second = (torch.autograd.grad(F.scaled_dot_product_attention(x, x, x).sum(), x)[0] for _ in range(2))
        print("equal:", torch.equal(first, second))

    def right(self) -> None:
        torch.use_deterministic_algorithms(True)
        x = torch.randn(1, 8, 4096, 64, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        first, second = (torch.autograd.grad(F.scaled_dot_product_attention(x, x, x).sum(), x)[0] for _ in range(2))
        print("equal:", torch.equal(first, second))


TRAPS = (GqaFallsBack, DeterministicByKernel)
