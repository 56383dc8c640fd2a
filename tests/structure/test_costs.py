"""What a unit costs a forward pass, beside what passes do before and after it goes."""

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import bmrs
from bmrs.price import NUMBER, of_structures


class Written(TorchDispatchMode):
    """Counts the numbers operations write: of each the first tensor it makes, unless that is a view."""

    def __init__(self):
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        there = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        out = function(*args, **(kwargs or {}))
        made = next((x for x in tree_leaves(out) if isinstance(x, Tensor)), None)
        if made is not None and (function._schema.is_mutable or made.untyped_storage().data_ptr() not in there):
            self.numbers += made.numel()
        return out


class Residual(nn.Module):
    def __init__(self, width, inner):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width, inner, 1), nn.BatchNorm2d(inner), nn.ReLU(), nn.Conv2d(inner, width, 3, padding=1)
        )

    def forward(self, x):
        return torch.relu(x + self.body(x))


def convolutional():
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2), Residual(8, 6),
        Residual(8, 6), nn.Conv2d(8, 10, 3, stride=2), nn.SiLU(), nn.Dropout(0.1), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(10, 4),
    )  # fmt: skip
    return model.eval(), torch.randn(2, 3, 12, 12)


def perceptron():
    model = nn.Sequential(nn.Linear(7, 12), nn.GELU(), nn.LayerNorm(12), nn.Linear(12, 9), nn.Tanh(), nn.Linear(9, 3))
    return model.eval(), torch.randn(5, 7)


def passing(model, x):
    with torch.no_grad(), Written() as written:
        model(x)
    return written.numbers, bmrs.cost.multiply_adds(model, x)


@pytest.mark.parametrize("make", [convolutional, perceptron])
def test_a_unit_costs_what_a_pass_has_less_to_do_without_it(make):
    names = [s.name for s in bmrs.structures(*make()) if s.kind != "block"]
    assert len(names) >= 1
    for name in names:
        model, x = make()
        structure = bmrs.structures(model, x)[name]
        numbers, multiply_adds = structure.activations_per_unit, structure.macs_per_unit
        before = passing(model, x)
        bmrs.remove(model, {structure: [0, 2]})
        after = passing(model, x)
        assert before[0] - after[0] == 2 * numbers
        assert before[1] - after[1] == 2 * multiply_adds


def test_a_block_costs_all_that_is_written_in_it():
    model, x = convolutional()
    block = bmrs.structures(model, x).blocks[0]
    # Four operations over 6×6 pixels of two images: of 6, 6, 6 and 8 channels.
    assert block.activations_per_unit == 2 * 36 * (6 + 6 + 6 + 8)


def test_the_price_of_time_is_that_of_multiply_adds_and_numbers():
    model, x = convolutional()
    structures = list(bmrs.structures(model, x))
    cost = [s.macs_per_unit + NUMBER * s.activations_per_unit for s in structures for _ in range(s.units)]
    want = 0.7 * torch.tensor(cost, dtype=torch.float64) / sum(cost)
    torch.testing.assert_close(of_structures("time", structures, strength=0.7), want)
