"""Tests with other libraries, which are skipped where those are not installed."""

import importlib.util
from contextlib import suppress

import torch


def _stand_in_for_torchvision():
    """A torchvision built for another torch cannot be imported for want of two operations, nor then transformers."""
    if importlib.util.find_spec("torchvision") is None:
        return
    try:
        import torchvision  # noqa: F401
    except Exception:
        library = torch.library.Library("torchvision", "FRAGMENT")
        for name in ("nms", "qnms"):
            with suppress(RuntimeError):
                library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        LIBRARIES.append(library)


LIBRARIES = []  # its operations go with it
_stand_in_for_torchvision()
