"""Residual branches whose last layer has lost outputs: put back at their place, in the order the network works in."""

import copy

import pytest
import torch
from torch import nn

import bmrs


class Residual(nn.Module):
    def __init__(self, width, inner):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width, inner, 1), nn.ReLU(), nn.Conv2d(inner, width, 3, padding=1), nn.BatchNorm2d(width)
        )

    def forward(self, x):
        return torch.relu(x + self.body(x))


def made(layout):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 12, 3), Residual(12, 5), Residual(12, 6))
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.weight)
            nn.init.normal_(module.bias)
    x = torch.randn(3, 3, 9, 9, dtype=torch.float64).contiguous(memory_format=layout)
    return model.double().to(memory_format=layout).eval(), x


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_what_is_left_is_the_network_without_those_rows(layout):
    model, x = made(layout)
    quiet, structures = copy.deepcopy(model), bmrs.structures(model, x)
    gone = [0, 3, 4, 7, 11]
    norm = quiet[2].body[3]
    with torch.no_grad():
        norm.weight[gone] = norm.bias[gone] = 0.0
    branch = next(s for s in structures.branches if s.name.startswith("2."))
    bmrs.remove(model, {branch: gone})
    assert model[2].body[3].num_features == 7
    assert model[2].body(model[:2](x)).is_contiguous(memory_format=layout)
    ends = []
    for network in (quiet, model):
        given = x.clone(memory_format=torch.preserve_format).requires_grad_()
        out = network(given)
        out.square().sum().backward()
        ends.append((out.detach(), given.grad, network[0].weight.grad, network[2].body[0].weight.grad))
    for want, got in zip(*ends, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-10)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_it_can_be_compiled_and_exported(layout):
    model, x = made(layout)
    branch = bmrs.structures(model, x).branches[0]
    bmrs.remove(model, {branch: [1, 2, 5]})
    with torch.no_grad():
        want = model(x)
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(x), want, rtol=0, atol=1e-12)
        batches = {0: torch.export.Dim("batch", min=2, max=64)}
        exported = torch.export.export(model, (x,), dynamic_shapes=(batches,)).module()
        for given in (x, torch.cat([x, x]).contiguous(memory_format=layout)):
            torch.testing.assert_close(exported(given), model(given), rtol=0, atol=1e-12)
