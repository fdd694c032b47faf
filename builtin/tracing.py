"""``torch.fx`` for models of these packages: the tracer of scratch, to which the classes of both are leaves."""

from scratch.tracing import Tracer

__all__ = ["Tracer"]
