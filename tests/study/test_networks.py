import re

import pytest
import torch

import bmrs
from bmrs.study import networks


@pytest.mark.parametrize("name", networks.NAMES)
@pytest.mark.parametrize("channels", [1, 3])
def test_every_layer_but_the_last_can_be_reduced(name, channels):
    network = networks.build(name, (channels, 32, 32), 7)
    found = bmrs.structures(network, torch.randn(2, channels, 32, 32))
    widths = {name: layer.weight.shape[0] for name, layer in network.named_children() if hasattr(layer, "weight")}
    assert widths.pop("out") == 7
    assert {structure.name: structure.units for structure in found} == widths


def test_widths_grow_with_the_channels():
    found = bmrs.structures(networks.lenet5(3, 10), torch.randn(2, 3, 32, 32))
    assert [structure.units for structure in found] == [18, 48, 360, 252]


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
