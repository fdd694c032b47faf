"""Which recorded operations are products of two tensors, and how their elements meet."""

from equivalence_tests.checker.engine.contraction import Contraction, einsum, matmul, multiplied_and_summed, pointwise
from equivalence_tests.checker.engine.watching import Operation

__all__ = ["contraction_of", "contraction_of_sum"]


def contraction_of(operation: Operation) -> Contraction | None:
    """Read a product.

    Args:
        operation: A recorded call of matmul, bmm, einsum, linear, ...

    Returns:
        None for what is no product of two tensors, or one that is not read.
    """
    name = operation.name
    if len(operation.inputs) < 2:
        return None
    first, second = (slot.value for slot in operation.inputs[:2])
    if name in ("matmul", "__matmul__", "bmm", "mm", "mv", "dot"):
        return matmul(first, second)
    if name == "linear":
        return matmul(first, second, turned=True) if second.dim() == 2 else None
    if name in ("conv1d", "conv2d", "conv3d"):
        return pointwise(first, second, operation.outputs[0].value)
    equation = operation.argument(0, "equation") if name == "einsum" and len(operation.inputs) == 2 else None
    return einsum(equation, first, second) if isinstance(equation, str) else None


def contraction_of_sum(product: Operation, total: Operation) -> Contraction | None:
    """Read (a * b).sum(axis) as a product.

    Args:
        product: The multiplication.
        total: The sum over one of its axes.
    """
    axis = total.argument(1, "dim", total.argument(1, "axis"))
    axis = axis[0] if isinstance(axis, tuple | list) and len(axis) == 1 else axis
    if not isinstance(axis, int) or len(product.inputs) != 2:
        return None
    first, second = (slot.value for slot in product.inputs)
    return multiplied_and_summed(first, second, axis, total.outputs[0].value.shape)
