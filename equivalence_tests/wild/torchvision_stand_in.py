"""Lets torchvision be imported where its compiled operators cannot be: no attention uses them."""

import importlib.util

import torch

__all__ = ["make_importable"]

OPERATORS = (
    "nms qnms roi_align _roi_align_backward ps_roi_align _ps_roi_align_backward roi_pool _roi_pool_backward "
    "ps_roi_pool _ps_roi_pool_backward qroi_align deform_conv2d _deform_conv2d_backward"
)
_declared: list[torch.library.Library] = []


def make_importable() -> None:
    """Declare the operators that torchvision describes while it is imported, without their code.

    >>> make_importable()
    """
    if _declared or importlib.util.find_spec("torchvision") is None:
        return
    try:
        import torchvision  # noqa: F401
    except RuntimeError:  # operator torchvision::nms does not exist
        import sys

        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        library = torch.library.Library("torchvision", "DEF")
        for name in OPERATORS.split():
            library.define(f"{name}(Tensor x) -> Tensor")
        _declared.append(library)
