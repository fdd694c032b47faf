"""The arguments of RMSNorm and rms_norm."""

import torch
from torch import nn
from torch.nn import functional as F

from equivalence_tests.learn.excerpts import Place
from equivalence_tests.learn.explain.entry import RMS_FUNCTION, RMS_NORM, Explanation
from scratch import RMSNorm, rms_norm

__all__ = ["EXPLANATIONS"]


def normalised() -> None:
    x = torch.randn(2, 5, 12)
    norm = nn.RMSNorm(normalized_shape=12, elementwise_affine=False)
    mean_square = norm(x).square().mean(-1)
    print("1 everywhere:", torch.allclose(mean_square, torch.ones(2, 5)))


def normalised_by_function() -> None:
    input = torch.tensor([3.0, -4.0, 0.0, 0.0])  # noqa: A001  torch's name
    normalized_shape = [4]
    print(F.rms_norm(input, normalized_shape))  # the mean square is 25 / 4


def kept_away_from_0() -> None:
    x = torch.tensor([0.01, -0.01])
    for eps in (1e-6, 0.01):
        print(f"eps={eps}:", F.rms_norm(x, [2], eps=eps))


def gains() -> None:
    for elementwise_affine in (True, False):
        norm = nn.RMSNorm(3, elementwise_affine=elementwise_affine)
        print(f"elementwise_affine={elementwise_affine}:", norm.weight)


def scaled() -> None:
    x, weight = torch.ones(3), torch.tensor([1.0, 2.0, 0.0])
    print(F.rms_norm(x, [3], weight))


def created() -> None:
    # a shape, no memory
    norm = nn.RMSNorm(12, device="meta", dtype=torch.float64)
    print(norm.weight.device, norm.weight.dtype)


MEAN = Place(rms_norm, "mean_square =")
CREATED = (Place(RMSNorm.__init__, "gains ="),)

EXPLANATIONS = (
    Explanation(
        "normalized_shape",
        (RMS_NORM, RMS_FUNCTION),
        "The trailing dimensions over which the mean is taken. A class takes one number for one dimension; the "
        "function "
        "wants a list.",
        (MEAN,),
        normalised_by_function,
    ),
    Explanation(
        "eps",
        (RMS_NORM, RMS_FUNCTION),
        "Keeps the root away from 0. By default it is the distance from 1 to the next larger number, that of "
        "float32 for half precision. Most models use 1e-6 or 1e-5, and the difference shows in rows of small "
        "numbers.",
        (Place(rms_norm, "eps = torch.finfo"), Place(rms_norm, "torch.rsqrt")),
        kept_away_from_0,
    ),
    Explanation(
        "elementwise_affine",
        (RMS_NORM,),
        "Whether each feature has a gain. There is never a bias, and no mean is subtracted: LayerNorm has both.",
        (Place(RMSNorm.__init__, "register_parameter"),),
        gains,
    ),
    Explanation(
        "device", (RMS_NORM,), "Where the gains are created. The inputs must be on the same device.", CREATED, created
    ),
    Explanation(
        "dtype",
        (RMS_NORM,),
        "The dtype of the gains. torch warns about inputs of another dtype, and takes a slower path.",
        CREATED,
        created,
    ),
    Explanation(
        "x",
        (RMS_NORM,),
        "What is normalised. Each row of its trailing dimensions is divided by the root of its mean square.",
        (MEAN, Place(rms_norm, "torch.rsqrt")),
        normalised,
    ),
    Explanation(
        "input",
        (RMS_FUNCTION,),
        "What is normalised. Half precision is computed in float32, and rounded at the end.",
        (MEAN, Place(rms_norm, "torch.rsqrt")),
        normalised_by_function,
    ),
    Explanation(
        "weight",
        (RMS_FUNCTION,),
        "The gains, one for each feature. They multiply after the division. Some models store the gain minus 1: "
        "add 1 to Gemma's weights.",
        (Place(rms_norm, "return (normalized"),),
        scaled,
    ),
)
