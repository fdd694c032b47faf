"""Whether heads and features lie among the weights in an order that torch has: merged as they were split."""

from collections.abc import Iterator

import torch
from torch import Tensor

from equivalence_tests.checker.equivalent.ending import Output
from equivalence_tests.checker.equivalent.operands import Projection
from equivalence_tests.checker.equivalent.steps import Step


def order_steps(query: Projection, key: Projection, value: Projection, output: Output) -> Iterator[Step]:
    """List where rows or columns of the weights are taken in an order of their own, which nothing says is intended."""
    rows = {"query": _rows(query), "key": _rows(key), "value": _rows(value)}
    heads = rows["query"][:, 0].argsort(stable=True)
    rows = {role: found[heads] for role, found in rows.items()}
    for role, one in (("query", query), ("key", key), ("value", value)):
        if one.bias is not None and not _ascends(one.weight, -1):
            yield Step(f"the {role} takes the features of the tokens in another order", "", "project")
        if bool((rows[role][1:, 0] < rows[role][:-1, 0]).any()):
            yield Step(f"the heads of the {role} are paired with others than those of the queries", "", "split")
    if not torch.equal(_ranks(rows["query"]), _ranks(rows["key"])):
        yield Step("the features of queries and keys are paired in another order", "", "split")
    columns = _columns(output, *value.weight.shape[:2])[heads]
    if not _alike(columns, rows["value"]):
        yield Step("the heads are put side by side in another order than they were split in", "", "merge")
    if output.bias is not None:
        order = output.weight[:, 0]
        biased = bool((output.bias >= 0).all())
        if bool((order.diff() < 0).any()) or (biased and bool((output.bias.diff() < 0).any())):
            yield Step("the features of the output are put in another order", "", "output")


def _rows(one: Projection) -> Tensor:
    """Where each row of a projection begins among the parameters, (heads, head_dim)."""
    return one.weight if one.bias is None else one.weight[..., 0]


def _columns(output: Output, heads: int, width: int) -> Tensor:
    """Where each averaged value meets the output projection, or lies in the output, (heads, head_dim)."""
    columns = output.weight.argsort() if output.bias is None else output.weight[0]
    return columns.unflatten(0, (heads, width))


def _alike(columns: Tensor, rows: Tensor) -> bool:
    """Whether heads are merged as they were split; where several share their values, head after head."""
    shared = len(rows[:, 0].unique()) < len(rows)
    if shared:
        return bool((columns.flatten().diff() > 0).all()) and torch.equal(_ranks(columns), _ranks(rows))
    return torch.equal(columns.flatten().argsort(), rows.flatten().argsort())


def _ranks(rows: Tensor) -> Tensor:
    return rows.argsort(-1).argsort(-1)


def _ascends(places: Tensor, axis: int) -> bool:
    return bool((places.diff(dim=axis) > 0).all())
