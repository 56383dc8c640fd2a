"""Networks from folders and from scratch, and where their gates go."""

import pytest
import torch

import bmrs
from bmrs.study.large.networks import build, name_of
from bmrs.study.large.placement import gated, short
from bmrs.study.large.recipe import SETTINGS, Recipe
from tests.study.large.made import write_resnet, write_vit

RESNET, VIT = SETTINGS["resnet50-cifar10"], SETTINGS["vit-cifar10"]
transformers = pytest.importorskip("transformers")


def test_a_head_is_new_and_the_rest_is_the_folder_s(tmp_path):
    write_resnet(tmp_path)
    recipe = Recipe(weights=str(tmp_path), resolution=32)
    first, again, other = (build(RESNET, 10, recipe, seed) for seed in (1, 1, 2))
    head = "classifier.1.weight"
    states = [network.state_dict() for network in (first, again, other)]
    assert states[0][head].shape == (10, 32)
    assert torch.equal(states[0][head], states[1][head])
    assert not torch.equal(states[0][head], states[2][head])
    whole = transformers.ResNetForImageClassification.from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(states[2][name], whole[name]) for name in whole if not name.startswith("classifier"))
    empty = build(RESNET, 10, recipe, 1, filled=False)
    assert {n: p.shape for n, p in empty.state_dict().items()} == {n: p.shape for n, p in states[0].items()}
    assert "from the weights" in name_of(RESNET, recipe)


def test_a_vit_s_positions_are_stretched(tmp_path):
    write_vit(tmp_path)
    at = {r: build(VIT, 10, Recipe(vit_weights=str(tmp_path), resolution=r), 0) for r in (32, 48)}
    name = "vit.embeddings.position_embeddings"
    old, new = (at[r].state_dict()[name] for r in (32, 48))
    assert (old.shape, new.shape) == ((1, 17, 24), (1, 37, 24))
    assert torch.equal(old[:, 0], new[:, 0])
    ours = at[32].vit.embeddings.interpolate_pos_encoding(torch.zeros(1, 37, 24), 48, 48)
    torch.testing.assert_close(new, ours)
    others = (n for n in at[32].state_dict() if n != name)
    assert all(torch.equal(at[32].state_dict()[n], at[48].state_dict()[n]) for n in others)
    assert at[48](torch.zeros(1, 3, 48, 48)).logits.shape == (1, 10)


def test_from_scratch(tmp_path):
    recipe = Recipe(scratch=True, vit="tiny", patch=8, resolution=32)
    network = build(VIT, 10, recipe, 0)
    assert network.config.hidden_size == 192
    assert network(torch.zeros(1, 3, 32, 32)).logits.shape == (1, 10)
    assert "from scratch (not pretrained)" in name_of(VIT, recipe)
    with pytest.raises(ValueError, match="--resolution must be a multiple of the ViT's patches of 8"):
        build(VIT, 10, Recipe(scratch=True, vit="tiny", patch=8, resolution=36), 0)


def test_what_cannot_be_loaded_says_what_to_do(tmp_path):
    with pytest.raises(ValueError, match=r"cannot be loaded .* with --weights, or train from --scratch\.$"):
        build(RESNET, 10, Recipe(weights=str(tmp_path)), 0)


def test_the_paper_s_53_places_of_resnet50():
    with torch.device("meta"):
        network = build(RESNET, 10, Recipe(scratch=True), 0)
        listing = bmrs.structures(network, torch.zeros(2, 3, 64, 64))
    chosen = gated(listing, "paper")
    norms = [m for m in network.modules() if isinstance(m, torch.nn.BatchNorm2d)]
    assert len(chosen) == len(norms) == 53
    assert sum(structure.units for structure in chosen) == sum(norm.num_features for norm in norms)
    everything = gated(listing, "all")
    assert {s.name for s in everything} >= {s.name for s in listing}
    assert len({short(s.name) for s in chosen}) == 53


def test_the_paper_s_places_of_a_vit(tmp_path):
    write_vit(tmp_path)
    network = build(VIT, 10, Recipe(vit_weights=str(tmp_path), resolution=32), 0)
    listing = bmrs.structures(network, torch.zeros(2, 3, 32, 32))
    assert [s.units for s in gated(listing, "paper")] == [24] * 4
    assert all(s.branch is not None for s in gated(listing, "paper"))
    assert {s.kind for s in gated(listing, "all")} >= {"head", "neuron"}
    with pytest.raises(ValueError, match="--gates paper"):
        gated(bmrs.structures(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)), torch.zeros(2, 4)),
              "paper")  # fmt: skip


def test_a_recipe_says_what_differs():
    assert Recipe().of(VIT).schedule == "linear"
    assert Recipe().of(RESNET).augment == "none"
    assert "vit" not in Recipe().to_json(RESNET)
    assert Recipe(scratch=True).to_json(VIT)["weights"] == "none, from scratch"
    with pytest.raises(ValueError, match="--precision: unknown choice 'fp8': choose from fp32"):
        Recipe(precision="fp8")
