import re

import pytest
import torch

from bmrs.price import prices

LAYERS = (6, 16, 120)


def test_layer_is_the_mean_over_layers_of_the_mean_over_units():
    kl = torch.rand(142, dtype=torch.float64)
    want = torch.stack([part.mean() for part in kl.split(LAYERS)]).mean()
    assert torch.allclose((prices("layer", LAYERS) * kl).sum(), want)


def test_uniform_is_the_mean_over_all_units():
    kl = torch.rand(142, dtype=torch.float64)
    assert torch.allclose((prices("uniform", LAYERS, strength=0.5) * kl).sum(), 0.5 * kl.mean())


def test_elbo_is_one_over_the_number_of_examples():
    assert prices("elbo", LAYERS, num_examples=1000).tolist() == [0.001] * 142


@pytest.mark.parametrize("kind", ["params", "macs", "time"])
def test_cost_is_shared_in_proportion(kind):
    got = prices(kind, (2, 1), cost=torch.tensor([1.0, 1.0, 6.0]), strength=2.0)
    assert got.tolist() == [0.25, 0.25, 1.5]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"kind": "free"}, "unknown price 'free': choose one of layer, uniform, params, macs, time, elbo."),
        ({"kind": "uniform", "strength": -1.0}, "strength must be"),
        ({"kind": "elbo"}, "price 'elbo' needs num_examples"),
        ({"kind": "elbo", "num_examples": 0}, "price 'elbo' needs num_examples"),
        ({"kind": "params"}, "price 'params' needs cost"),
        ({"kind": "macs", "cost": torch.ones(3)}, "cost must hold 142 non-negative entries"),
        ({"kind": "macs", "cost": -torch.ones(142)}, "cost must hold 142 non-negative entries"),
    ],
)
def test_bad_input_gives_one_sentence(arguments, sentence):
    with pytest.raises(ValueError, match=re.escape(sentence)):
        prices(units_per_layer=LAYERS, **arguments)
