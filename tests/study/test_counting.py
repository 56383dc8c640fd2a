"""What is left of a network, against networks that were made smaller."""

import pytest
import torch

import bmrs
from bmrs.cost import multiply_adds, parameters
from bmrs.study import networks
from bmrs.study.counting import Counting


def built(name):
    shape = (1, 32, 32)
    network = networks.lenet5(1, 10) if name == "lenet5" else networks.mlp(1024, 10, (12, 9, 7))
    x = torch.randn(2, *shape)
    return network, list(bmrs.structures(network, x).verify()), x


@pytest.mark.parametrize("name", ["lenet5", "mlp"])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.8])
def test_actual_counting_is_that_of_the_smaller_network(name, share):
    network, structures, x = built(name)
    counting = Counting(network, structures, x)
    whole = parameters(network)
    alive = torch.rand(1, counting.units) >= share
    for own in counting.layers.values():
        alive[0, own.start] = True  # the library empties no layer
    bmrs.remove(network, {s: (~alive[0, counting.layers[s.name]]).nonzero().flatten().tolist() for s in structures})
    left = counting.left(alive)
    assert int(left["parameters"][0]) == parameters(network)
    assert float(left["actual"][0]) == pytest.approx(1 - parameters(network) / whole)
    assert int(left["multiply_adds"][0]) == multiply_adds(network, x[:1])


@pytest.mark.parametrize("name", ["lenet5", "mlp"])
def test_published_counting_is_that_of_zeros(name):
    """Rows of a removed unit, and the next layer's columns where those are as many as units."""
    network, structures, x = built(name)
    counting = Counting(network, structures, x)
    alive = torch.rand(3, counting.units) < 0.5
    left = counting.left(alive)
    for member in range(3):
        zeros = 0
        weights = [weight for weight in network.parameters() if weight.dim() > 1]
        masks = [alive[member, own] for own in counting.layers.values()]
        for weight, rows, columns in zip(weights, [*masks, None], [None, *masks], strict=True):
            kept = torch.ones_like(weight)
            if rows is not None:
                kept[~rows] = 0
            if columns is not None and len(columns) == weight.shape[1]:
                kept[:, ~columns] = 0
            zeros += int((kept == 0).sum())
        removed, total = int((~alive[member]).sum()), parameters(network)
        assert float(left["published_plain"][member]) == pytest.approx(zeros / total)
        wanted = (zeros + 2 * removed) / (total + 2 * counting.units)
        assert float(left["published"][member]) == pytest.approx(wanted)
