"""The processor's own code for gates: ``native.c``, compiled once per machine and kept in the user's cache.

Without a C compiler, or where what it makes does not compute what plain torch does, plain torch computes: the same
numbers, more slowly. ``BMRS_FUSED=0`` in the environment asks for that.
"""

import ctypes
import hashlib
import itertools
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bmrs import fused
from bmrs.posterior import LOG_A, LOG_B, LOG_SIGMA_RANGE

log = logging.getLogger("bmrs")

_SOURCE = Path(__file__).with_name("native.c")
_FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-fopenmp-simd", "-shared", "-fPIC")
_SECONDS = 60.0  # a compiler that takes longer is broken
SCALED = {torch.float32: "f32", torch.bfloat16: "bf16"}
_WHOLE, _SINGLE, _DOUBLE, _TENSOR = ctypes.c_int64, ctypes.c_float, ctypes.c_double, ctypes.c_void_p


@cache
def available() -> bool:
    """Whether gates on the processor are computed by compiled code."""
    if not fused.wanted():
        return False
    try:
        right = _agrees()
    except Exception as problem:
        log.info("gates on the CPU are computed by plain torch, more slowly: %s", problem)
        return False
    if not right:
        log.warning("the C compiler's code for gates is wrong on this machine: plain torch computes them, more slowly.")
    return right


def draw(
    mu: Tensor, log_sigma: Tensor, alive: Tensor, seeds: Tensor, step: Tensor, units: Tensor, examples: int,
    low: float = LOG_A, high: float = LOG_B,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """As :func:`bmrs.draws.draw`, with the derivatives by μ and log σ."""
    members, number = mu.shape
    theta, by_mu, by_log_sigma = (torch.empty(members, examples, number) for _ in range(3))
    inputs = [tensor.contiguous() for tensor in (mu, log_sigma, alive, seeds, units)]
    at = [tensor.data_ptr() for tensor in inputs]
    _library().bmrs_draw(
        members, examples, number, at[0], at[1], at[2], at[3], int(step), at[4], low, high, *LOG_SIGMA_RANGE,
        theta.data_ptr(), by_mu.data_ptr(), by_log_sigma.data_ptr(),
    )  # fmt: skip
    return theta, by_mu, by_log_sigma


def sums(grad: Tensor, by_mu: Tensor, by_log_sigma: Tensor) -> tuple[Tensor, Tensor]:
    """Σ over examples of grad·∂θ/∂μ and grad·∂θ/∂log σ."""
    members, examples, number = grad.shape
    grad = grad.contiguous()
    to_mu, to_log_sigma = (torch.empty(members, number) for _ in range(2))
    _library().bmrs_sums(
        members, examples, number, *(t.data_ptr() for t in (grad, by_mu, by_log_sigma, to_mu, to_log_sigma))
    )
    return to_mu, to_log_sigma


def kl_gradient(
    mu: Tensor, log_sigma: Tensor, weights: Tensor, low: float = LOG_A, high: float = LOG_B
) -> tuple[Tensor, Tensor]:
    """The gradients of Σ weight·KL by μ and log σ of every gate."""
    inputs = [tensor.contiguous() for tensor in (mu, log_sigma, weights)]
    by_mu, by_log_sigma = (torch.empty(mu.shape) for _ in range(2))
    at = [tensor.data_ptr() for tensor in (*inputs, by_mu, by_log_sigma)]
    _library().bmrs_kl_gradient(mu.numel(), *at[:3], low, high, *LOG_SIGMA_RANGE, *at[3:])
    return by_mu, by_log_sigma


def mean(mu: Tensor, log_sigma: Tensor, low: float = LOG_A, high: float = LOG_B) -> Tensor:
    """E[θ] of every gate."""
    mu, log_sigma = mu.contiguous(), log_sigma.contiguous()
    result = torch.empty_like(mu)
    at = [tensor.data_ptr() for tensor in (mu, log_sigma, result)]
    _library().bmrs_mean(mu.numel(), at[0], at[1], low, high, *LOG_SIGMA_RANGE, at[2])
    return result


def product(kind: torch.dtype) -> Any:
    """The code of x·θ for ``x`` of this dtype, which is one of :data:`SCALED`; see ``native.c``."""
    return getattr(_library(), f"bmrs_scale_{SCALED[kind]}")


def gradients(kind: torch.dtype) -> Any:
    """And that of the gradients of both."""
    return getattr(_library(), f"bmrs_slopes_{SCALED[kind]}")


@cache
def _library() -> Any:
    library = ctypes.CDLL(str(_compiled()))
    library.bmrs_draw.argtypes = [_WHOLE] * 3 + [_TENSOR] * 4 + [_WHOLE, _TENSOR] + [_SINGLE] * 4 + [_TENSOR] * 3
    library.bmrs_sums.argtypes = [_WHOLE] * 3 + [_TENSOR] * 5
    library.bmrs_kl_gradient.argtypes = [_WHOLE] + [_TENSOR] * 3 + [_DOUBLE] * 4 + [_TENSOR] * 2
    library.bmrs_mean.argtypes = [_WHOLE] + [_TENSOR] * 2 + [_DOUBLE] * 4 + [_TENSOR]
    functions = [library.bmrs_draw, library.bmrs_sums, library.bmrs_kl_gradient, library.bmrs_mean]
    for kind in SCALED.values():
        product, gradients = getattr(library, f"bmrs_scale_{kind}"), getattr(library, f"bmrs_slopes_{kind}")
        product.argtypes, gradients.argtypes = [_WHOLE] * 5 + [_TENSOR] * 3, [_WHOLE] * 5 + [_TENSOR] * 5
        functions += [product, gradients]
    for function in functions:
        function.restype = None
    return library


def _compiled() -> Path:
    """The library, made now if this machine has none of this source."""
    compiler = os.environ.get("CC") or next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if compiler is None:
        raise RuntimeError("there is no C compiler")
    source = _SOURCE.read_bytes()
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "bmrs"
    # Homes are shared between machines, whose processors differ in what they can do.
    machine = f"{compiler} {_FLAGS} {platform.platform()} {_processor()}".encode()
    path = folder / f"native-{hashlib.sha256(source + machine).hexdigest()[:16]}.so"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as aside:
            made = Path(aside) / path.name
            command = [*compiler.split(), *_FLAGS, "-o", str(made), str(_SOURCE), "-lm"]
            done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
            if done.returncode:
                raise RuntimeError(f"{compiler} failed: {done.stderr.strip()[:200]}")
            made.replace(path)  # whole or not at all, whoever else makes it
    return path


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())


def _agrees() -> bool:
    """Whether the compiled code computes what plain torch does, on gates of every kind."""
    from bmrs import _scale_native, draws

    places, widths = (
        torch.tensor([-30.0, -20.0, -12.0, -1.0, 0.0, 0.05, 3.0]),
        torch.tensor([-8.0, -5.0, -1.0, 2.0, 4.9]),
    )
    mu, log_sigma = places.repeat_interleave(len(widths))[None], widths.repeat(len(places))[None]
    alive, units = torch.ones_like(mu, dtype=torch.bool), torch.arange(mu.numel())[None]
    seeds, step = torch.tensor([7]), torch.tensor(3)
    got = draw(mu, log_sigma, alive, seeds, step, units, 40)
    want = draws.exact(mu.double(), log_sigma.double(), alive, draws.uniforms(seeds, step, units, 40))
    grad = torch.linspace(-1.0, 1.0, got[0].numel()).view_as(got[0])  # nobody's random numbers
    pairs = [
        *zip(got, want, strict=True),
        *zip(sums(grad, got[1], got[2]), ((grad * got[1]).sum(1), (grad * got[2]).sum(1)), strict=True),
        (mean(mu, log_sigma), draws.exact_mean(mu.double(), log_sigma.double())),
        *zip(
            kl_gradient(mu, log_sigma, grad[0, 0][None]),
            draws.exact_kl_gradient(mu.double(), log_sigma.double(), grad[0, 0][None].double()),
            strict=True,
        ),
    ]
    for kind, (before, after) in itertools.product(SCALED, ((1, 1), (1, 21), (21, 1))):
        x = grad.flatten()[: 2 * 23 * before * after].view(2, before, 23, after).to(kind)
        back, theta = x.flip(0), got[0][0, :2, :23]
        products = (back * x.float()).sum((1, 3)), (back * theta[:, None, :, None]).to(kind)
        gradients = _scale_native.backward(back, x, theta, before, 23, after)
        pairs += zip(reversed(gradients), products, strict=True)
        pairs.append((_scale_native.forward(x, theta, before, 23, after), (x * theta[:, None, :, None]).to(kind)))
    return all(torch.allclose(one.double(), other.double(), rtol=1e-4, atol=1e-3) for one, other in pairs)
