"""Where kernels can run: on a GPU; or slowly anywhere, in Triton's interpreter.

pip install triton
TRITON_INTERPRET=1 pytest tests/gpu/test_kernels.py
"""

import os
import types

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"

needed = pytest.mark.skipif(
    not INTERPRETED and not torch.cuda.is_available(), reason="needs a GPU, or Triton's interpreter"
)


def functions():
    """CUDA's special functions, which the interpreter lacks."""
    import numpy as np
    import triton.language as tl
    from scipy import special
    from triton.runtime.interpreter import TensorHandle

    def of(function):
        def computed(x):
            values = function(x.handle.data).astype(x.handle.data.dtype)
            return tl.core.tensor(TensorHandle(values, x.handle.dtype), x.type)

        return computed

    known = {"erfcx": special.erfcx, "erfc": special.erfc, "erf": special.erf, "log1p": np.log1p,
             "normcdf": special.ndtr, "normcdfinv": special.ndtri}  # fmt: skip
    return types.SimpleNamespace(**{name: of(function) for name, function in known.items()})
