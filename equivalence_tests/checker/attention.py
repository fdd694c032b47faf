"""Check an attention: build it, watch it run, and hold it and what it offers against torch."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from equivalence_tests.checker.construction import prepare
from equivalence_tests.checker.engine.subjects import diagnose_subject
from equivalence_tests.checker.errors import CannotCheckError
from equivalence_tests.checker.report import Report
from equivalence_tests.checker.state import default_dtype
from equivalence_tests.checker.subject import Adapter, Subject, subjects

__all__ = ["examine_attention"]

MOST_SIZES = 3  # after which what could not be read at any is not tried at others


def examine_attention(
    found: Any,
    name: str,
    adapter: Adapter | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> Report:
    """Check an attention that has been imported already; the caller preserves the global state.

    Args:
        found: A class, an instance, a function or a factory.
        name: What to call it.
        adapter: What cannot be found out.
        progress: Receives a line of text now and then.

    Returns:
        The report on the first sizes at which it could be read; what can be called is not excused at easier ones.

    Raises:
        CannotCheckError: If it cannot be built, or called as an attention.
    """
    errors: list[str] = []
    unread: list[Report] = []
    for subject in subjects(found, name, adapter or Adapter()):
        progress(f"built {name} with {subject.sizes.num_heads} heads of {subject.sizes.head_dim}")
        report = _watched(subject, errors)
        if report is not None and report.verdict != "unchecked":
            return report
        unread += [report] if report is not None else []
        if len(unread) == MOST_SIZES:
            break
    if not unread:
        raise CannotCheckError(_cannot_call(errors))
    return unread[0]


def _watched(subject: Subject, errors: list[str]) -> Report | None:
    """Watch one built subject run, in float64; in float32 where float64 cannot be called."""
    subject.function = _copy(subject.function)
    for dtype in (torch.float64, torch.float32):
        subject.dtype = dtype
        if subject.module is not None:
            prepare(subject.module, dtype)
        with default_dtype(dtype):  # a mask made inside is then of the scores' dtype
            report = diagnose_subject(subject, errors)
        if report is not None:
            return report
    return None


def _copy(function: Any) -> Any:
    """Leave the user's own instance alone."""
    if not isinstance(function, nn.Module):
        return function
    try:
        return copy.deepcopy(function)
    except Exception:  # some modules cannot be copied; their weights are put back by nobody
        raise CannotCheckError("the instance cannot be deep-copied; pass its class or a factory instead") from None


def _cannot_call(errors: list[str]) -> str:
    shown = "\n".join(f"  {text}" for text in list(dict.fromkeys(errors))[:4])
    answered = f"Its forward answered:\n{shown}\n" if shown else "Its forward names no argument to pass tensors to. "
    return (
        f"No way to call it as an attention was found. {answered}"
        "Give Adapter(call=lambda module, query, key, value, may_attend: ...), or --kind if it is something else."
    )
