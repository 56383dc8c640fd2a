"""x·θ against the obvious slow way."""

import pytest
import torch

from bmrs.scaling import _laid_out, scale


def slowly(x, theta, dim, each):
    """One unit of one example after the other, in float64."""
    result = x.double().clone()
    for row in range(len(x) if dim else 1):
        for unit in range(theta.shape[1]):
            part = result if not dim else result[row]
            along = dim - 1 if dim else 0
            factor = theta[row if len(theta) > 1 else 0, unit].double()
            part.narrow(along, unit * each, each).mul_(factor)
    return result


CASES = [
    ((4, 6), 1, 1), ((4, 6), 1, 3), ((3, 5, 4, 2), 1, 1), ((2, 3, 8), 2, 1), ((2, 3, 8), 2, 4), ((7,), 0, 1),
    ((3, 4, 5), 1, 2), ((0, 6), 1, 1), ((3, 4, 0, 2), 1, 1),
]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("shape", "dim", "each"), CASES)
@pytest.mark.parametrize("rows", ["each", "one"])
def test_values_and_gradients(shape, dim, each, rows, dtype):
    x = torch.randn(shape).to(dtype).requires_grad_()
    theta = torch.rand(shape[0] if rows == "each" and dim else 1, shape[dim] // each, requires_grad=True)
    out = scale(x, theta, dim, each)
    assert out.dtype == dtype
    half = dtype in (torch.bfloat16, torch.float16)
    close = {"rtol": 2**-8 if dtype == torch.bfloat16 else 2**-10 if half else 1e-6, "atol": 1e-6}
    torch.testing.assert_close(out.double(), slowly(x.detach(), theta.detach(), dim, each), **close)
    slope = torch.randn_like(out)
    to_x, to_theta = torch.autograd.grad(out, (x, theta), slope)
    torch.testing.assert_close(to_x.double(), slowly(slope, theta.detach(), dim, each), **close)
    if not x.numel():
        assert (to_theta == 0).all()
        return
    products = (slope.double() * x.detach().double()).movedim(dim, 0).unflatten(0, (-1, each)).transpose(0, 1)
    if dim:
        products = products.movedim(2, 0)  # example, each, unit, ...
        want = products.sum(dim=[1, *range(3, products.dim())])
        want = want if len(theta) > 1 else want.sum(0, keepdim=True)
    else:
        want = products.sum(0)[None]
    torch.testing.assert_close(to_theta.double(), want, **{**close, "atol": 1e-2 if half else 1e-5})


def test_dimensions_count_from_the_end_too():
    x, theta = torch.randn(3, 5, 4), torch.rand(3, 4)
    assert torch.equal(scale(x, theta, -1), scale(x, theta, 2))


def test_the_layout_stays():
    x = torch.randn(2, 4, 3, 3).to(memory_format=torch.channels_last)
    assert scale(x, torch.rand(2, 4), 1).is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    ("x", "dim", "each", "laid"),
    [
        (torch.empty(2, 4, 3, 5), 1, 1, (1, 4, 15)),
        (torch.empty(2, 4, 3, 5).to(memory_format=torch.channels_last), 1, 1, (15, 4, 1)),
        (torch.empty(2, 7, 6), 2, 1, (7, 6, 1)),
        (torch.empty(2, 7, 6), 2, 3, None),  # positions in front and columns behind
        (torch.empty(2, 50), 1, 25, (1, 2, 25)),
        (torch.empty(2, 4, 3, 5).transpose(2, 3), 1, 1, None),
        (torch.empty(5), 0, 1, None),
    ],
)
def test_how_it_lies(x, dim, each, laid):
    assert _laid_out(x, dim, each) == laid
