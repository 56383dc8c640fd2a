import re

import pytest
import torch
from torch import nn

import bmrs
from bmrs.study import networks


@pytest.mark.parametrize("name", networks.NAMES)
@pytest.mark.parametrize("channels", [1, 3])
def test_the_compact_network_equals_the_gated_one(name, channels):
    network = networks.build(name, (channels, 32, 32), 7).double()
    bank = bmrs.NoiseBank.attach(network, networks.gated_outputs(network))
    with torch.no_grad():
        bank.mu.uniform_(-4, 0.5)
        bank.log_sigma.uniform_(-3, 3)
    gone = torch.rand(bank.alive.shape) < 0.5
    for layer in bank.layers.values():
        gone[layer.start] = False
    bank.remove(gone)
    network.eval()
    x = torch.randn(5, channels, 32, 32, dtype=torch.float64)
    want = network(x)
    factors = {gate: bank.mean()[layer] for gate, layer in bank.layers.items()}
    bank.detach()
    small = networks.compact(network, factors)
    torch.testing.assert_close(small(x), want, rtol=0, atol=1e-12)
    assert bmrs.cost.parameters(small) < 0.6 * bmrs.cost.parameters(network)
    # Physically smaller, and a network of its own.
    widths = [layer.weight.shape[0] for layer in small if isinstance(layer, nn.Conv2d | nn.Linear)]
    assert widths == [*bank.units_left().values(), 7]
    assert all(a.data_ptr() != b.data_ptr() for a in small.parameters() for b in network.parameters())


def test_widths_grow_with_the_channels():
    assert list(networks.gated_outputs(networks.lenet5(3, 10)).values()) == [18, 48, 360, 252]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("alexnet", (1, 32, 32), 10), "unknown network 'alexnet': choose one of lenet5, mlp."),
        (("lenet5", (1, 28, 28), 10), "lenet5 takes 32×32 images; got 28×28"),
    ],
)
def test_bad_input_gives_one_sentence(arguments, sentence):
    with pytest.raises(ValueError, match=re.escape(sentence)):
        networks.build(*arguments)
