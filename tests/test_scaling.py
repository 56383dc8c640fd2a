"""x·θ against the obvious slow way."""

import multiprocessing

import pytest
import torch

from bmrs import _scale_native, native, scaling
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


@pytest.fixture(params=["plain torch", "compiled code"])
def computed_by(request, monkeypatch):
    """Small tensors go one way or the other too."""
    if request.param == "compiled code" and not native.available():
        pytest.skip("no C compiler")
    few = 0 if request.param == "compiled code" else 1 << 60
    monkeypatch.setattr(scaling, "FEW_HERE", dict.fromkeys(native.SCALED, few))


CASES = [
    ((4, 6), 1, 1), ((4, 6), 1, 3), ((3, 5, 4, 2), 1, 1), ((2, 3, 8), 2, 1), ((2, 3, 8), 2, 4), ((7,), 0, 1),
    ((3, 4, 5), 1, 2), ((0, 6), 1, 1), ((3, 4, 0, 2), 1, 1),
]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("shape", "dim", "each"), CASES)
@pytest.mark.parametrize("rows", ["each", "one"])
def test_values_and_gradients(computed_by, shape, dim, each, rows, dtype):
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


def test_the_layout_stays(computed_by):
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


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def large(kind, layout):
    x = torch.randn(7, 33, 50, 61, generator=torch.Generator().manual_seed(1)).to(kind)
    return x.contiguous(memory_format=layout).requires_grad_()


def by_hand(x, theta):
    """By torch's own product and autograd."""
    product = (x * theta[:, :, None, None]).to(x.dtype)
    slope = torch.linspace(-1, 1, x.numel()).view_as(x).to(x.dtype)
    return product, *torch.autograd.grad(product, (x, theta), slope)


def by_scale(x, theta):
    product = scale(x, theta, 1)
    slope = torch.linspace(-1, 1, x.numel()).view_as(x).to(x.dtype)
    return product, *torch.autograd.grad(product, (x, theta), slope)


@pytest.mark.skipif(not native.available(), reason="no C compiler")
@pytest.mark.parametrize("kind", list(native.SCALED))
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_compiled_code_shared_by_threads(two_threads, kind, layout):
    x, theta = large(kind, layout), torch.rand(7, 40, requires_grad=True)[:, 4:37]  # rows that do not lie side by side
    assert scaling._kernels(x * 1, theta, behind=False) is not None
    got, want = by_scale(x * 1, theta), by_hand(x * 1, theta)
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])  # rounded in the same places
    torch.testing.assert_close(got[2], want[2], rtol=1e-4, atol=1e-2)  # of sums of 3050 numbers up to 4


def _shared(rows):
    """Which rows threads were given."""
    seen = []
    _scale_native._share(lambda first, some: seen.extend(range(first, first + some)), rows, 1 << 30)
    return sorted(seen)


@pytest.mark.parametrize("rows", [1, 2, 7])
def test_every_row_is_computed_once(two_threads, rows):
    assert _shared(rows) == list(range(rows))


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="no fork")
def test_a_forked_process_has_threads_of_its_own(two_threads):
    assert _shared(7) == list(range(7))
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    child = context.Process(target=lambda: answers.put(_shared(7)))
    child.start()
    try:
        assert answers.get(timeout=30) == list(range(7))
    finally:
        child.kill()


@pytest.mark.skipif(not native.available(), reason="no C compiler")
def test_what_is_not_a_number_stays_so(monkeypatch):
    monkeypatch.setattr(scaling, "FEW_HERE", dict.fromkeys(native.SCALED, 0))
    x = torch.tensor([[float("nan"), float("inf"), -float("inf"), 1.0, 3e38]]).to(torch.bfloat16)
    with torch.no_grad():
        out = scale(x, torch.tensor([[1.0, 1.0, 0.0, float("nan"), 2.0]]), 1)
    assert out.isnan().tolist() == [[True, False, True, True, False]]
    assert out[0, [1, 4]].tolist() == [float("inf"), float("inf")]
