"""Comparison with a reference: relative, or absolute where the value is near zero."""

import torch


def assert_close(got, want, relative, absolute=1e-6):
    got = torch.as_tensor(got, dtype=torch.float64)
    want = torch.as_tensor(want, dtype=torch.float64)
    assert torch.isfinite(got).all(), "non-finite result"
    error = (got - want).abs()
    worst = (error - torch.clamp(relative * want.abs(), min=absolute)).argmax()
    assert (error <= torch.clamp(relative * want.abs(), min=absolute)).all(), (
        f"at index {int(worst)}: got {got.flatten()[worst]}, want {want.flatten()[worst]}"
    )
