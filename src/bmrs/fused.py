"""Whether fused code may be used, and Triton's kernels where they can be had."""

import importlib
import os
from functools import cache
from types import ModuleType


def wanted() -> bool:
    """``BMRS_FUSED=0`` in the environment asks for plain torch, on a processor and on a GPU."""
    return os.environ.get("BMRS_FUSED", "1") != "0"


@cache
def kernels(name: str) -> ModuleType | None:
    """A module of kernels; None where Triton is not installed, or kernels are not wanted."""
    if not wanted():
        return None
    try:
        return importlib.import_module(f"bmrs.{name}")
    except ImportError:
        return None
