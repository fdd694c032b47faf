"""``torch.fx`` for models of these packages: their classes are leaves, as torch.nn's are."""

from torch import fx, nn

__all__ = ["Tracer"]


class Tracer(fx.Tracer):
    """Trace a model symbolically and leave the attentions, layers and stacks in it whole.

    ``torch.fx.symbolic_trace`` goes through every class that is not torch.nn's own, and a check of an argument cannot
    be followed without the argument. To this tracer the classes of ``scratch`` and ``builtin`` are what torch.nn's are
    to torch's: one node each. A subclass is traced through, as one of torch.nn's would be.

    Args:
        autowrap_modules: Python modules whose functions are not traced through.
        autowrap_functions: Functions that are not.
        param_shapes_constant: Read the shapes of parameters as constants.

    In torch.nn: ``torch.fx.Tracer``, to which the classes of torch.nn are leaves.

    Source: https://docs.pytorch.org/docs/stable/fx.html

    >>> from scratch import TransformerEncoderLayer
    >>> model = nn.Sequential(nn.Linear(5, 12), TransformerEncoderLayer(d_model=12, nhead=3))
    >>> graph_module = fx.GraphModule(model, Tracer().trace(model))
    >>> [node.target for node in graph_module.graph.nodes if node.op == "call_module"]
    ['0', '1']
    """

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Return whether a module becomes one node.

        Args:
            m: The module.
            module_qualified_name: Its path in the model.

        Returns:
            Whether it is a class of torch.nn, ``scratch`` or ``builtin``.
        """
        ours = type(m).__module__.split(".")[0] in ("scratch", "builtin")
        return ours or super().is_leaf_module(m, module_qualified_name)
