"""Sizing on paper: what is computed is what is there, on two layers and by hand; and the page shows the results."""

import json
from pathlib import Path

import pytest
import torch

import bmrs
from tests import integrations  # noqa: F401  transformers cannot be imported without its stand-in

pytest.importorskip("transformers")

from benchmarks import scale, scale_tables, sizing

ROOT = Path(__file__).parent.parent
NAMES = list(scale.CONFIGURATIONS)
# Small enough to count: 2 layers, 8 wide, 12 neurons, 4 heads of 3 in 2 groups, 10 words.
TINY = sizing.Decoder(2, 8, 12, 4, 2, 3, 10)
CONSTANTS = sizing.Constants(draw=2e-9, draw_peak=100.0, kl=3e-9, scores=5e-9, record=7.0, indices=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_two_real_layers_have_the_structures_and_counts_of_the_formulas(name):
    model, inputs = scale.build(name, num_hidden_layers=2)
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    structures = bmrs.structures(model, inputs)
    expected = scale.decoder(name, num_hidden_layers=2)
    neurons = scale.CONFIGURATIONS[name]["intermediate_size"]
    assert sum(p.numel() for p in model.parameters()) == structures.parameters == expected.parameters
    assert sorted((s.kind, s.units) for s in structures) == [("group", 8)] * 2 + [("neuron", neurons)] * 2
    assert {s.params_per_unit for s in structures} == {3 * 4096, 10 * 128 * 4096}
    assert scale.agrees(structures, expected)
    assert structures.share == pytest.approx(expected.removable / expected.parameters)
    assert scale.patterns(structures) == scale.patterns(bmrs.structures(*scale.build(name, **scale.narrow(name))))
    assert structures["model.layers.0.mlp.gate_proj"].consumers == (("model.layers.0.mlp.down_proj.weight", 1),)


@pytest.mark.parametrize("name", NAMES)
def test_two_narrow_layers_are_proved(name):
    assert scale.prove(name) == {"structures": 4, "exact": 4, "as_computed": True}


@pytest.mark.parametrize(("name", "published"), [("Llama-3-8B", 8_030_261_248), ("Qwen3-8B", 8_190_735_360)])
def test_the_full_networks_have_the_published_numbers_of_parameters(name, published):
    assert scale.decoder(name).parameters == published


def test_a_structure_that_is_missing_or_too_small_is_seen():
    model, inputs = scale.build("Llama-3-8B", **scale.narrow("Llama-3-8B"))
    structures = bmrs.structures(model, inputs)
    right = scale.decoder("Llama-3-8B", **scale.narrow("Llama-3-8B"))
    assert scale.agrees(structures, right)
    for wrong in ({"num_hidden_layers": 3}, {"intermediate_size": 895}, {"num_key_value_heads": 4}):
        changed = {**scale.narrow("Llama-3-8B"), **wrong}
        assert not scale.agrees(structures, scale.decoder("Llama-3-8B", **changed)), wrong


def test_sizes_are_those_counted_by_hand():
    # A neuron: 3 × 8. A group: 8 × 3 × (key, value, 2 queries, 2 outputs). A layer: 12 neurons, 2 groups, 2 norms of 8.
    assert (TINY.per_neuron, TINY.per_group) == (24, 144)
    assert TINY.layer == 12 * 24 + 2 * 144 + 16 == 592
    assert TINY.parameters == 2 * 592 + 10 * 8 + 10 * 8 + 8 == 1352
    assert TINY.removable == 2 * (288 + 288)
    assert TINY.units == 2 * (12 + 2)
    assert TINY.columns == 2 * (12 + 12)


def test_memory_and_time_are_those_computed_by_hand():
    run = sizing.Run(gpus=4, sequences=3, length=5)
    machine = sizing.Machine(peak=1e6, utilisation=0.5, bandwidth=1e6, inside=1e5, between=1e4)
    held = list(sizing.memory(TINY, run, CONSTANTS).values())
    inside = 4 * 8 + 2 * (4 + 2) * 3 + 4 * 12
    assert held == [16 * 1352 / 4, 4 * 592, 2 * 15 * 8 * 2, 2 * 15 * inside, 10 * 15 * 10, 32 * 28, 100 * 3 * 28, 720]
    assert list(sizing.step(TINY, run, CONSTANTS, machine).values()) == pytest.approx(
        [8 * 1352 * 15 / 5e5, 6 * 1352 * 0.75 / 1e5, 2e-9 * 3 * 28, 3e-9 * 28, 14 * 15 * 48 / 1e6, 16 * 28 * 0.75 / 1e5]
    )
    far = sizing.Run(gpus=16, sequences=3, length=5, per_example=False)
    slow = list(sizing.step(TINY, far, CONSTANTS, machine).values())
    assert slow[1:3] == pytest.approx([6 * 1352 * 15 / 16 / 1e4, 2e-9 * 28])
    assert list(sizing.prune(TINY, run, CONSTANTS, machine).values()) == pytest.approx(
        [12 * 1352 * 0.75 / 1e5, 40 * 1352 / 1e6, 5e-9 * 28, 1e-6 * 28, 8 * 1352 / 1e6, 24 * 1352 / 1e6]
    )
    # Rows of a layer that are cut: 12 of gate, 12 of up, 12 of queries, 6 of keys, 6 of values, each 8 wide.
    assert sizing.traffic_of_cut(TINY, 4) == 12 * 2 * 48 * 8 * 0.75
    files = list(sizing.checkpoints(TINY, CONSTANTS, left=0.5).values())
    assert files == [12 * 1352, 24 * 28, 7 * 28, 12 * (1352 - 576), 2 * (1352 - 576)]
    assert sizing.least_steps(1e-5, 10) == pytest.approx(80_000)


def test_a_gpu_s_costs_lie_between_those_measured():
    measured = {100.0: 4e-9, 10_000.0: 1e-9}
    machine = sizing.Machine(bandwidth=1e10)
    got = scale.on_a_gpu(measured, 1000, machine)
    assert got == pytest.approx({"draw": 3.2e-9, "kl": 4.4e-9, "scores": 2e-9})
    assert scale.on_a_gpu(measured, 10**6, machine)["scores"] == 1e-9


def test_memory_of_tensors_is_counted():
    x = torch.ones(1000)
    with scale.Allocated() as allocated:
        y = x + 1  # 4000 bytes
        y.add_(1)  # none
        z = y.view(10, 100) * 2.0  # 4000 more
        del y
        z = z.double()  # 8000 more, and 4000 fewer afterwards
    assert allocated.most == 16_000 - 4000
    assert allocated.now == z.nbytes == 8000


def test_the_pages_show_the_results():
    content = json.loads((ROOT / "results" / "scale.json").read_text())
    page = (ROOT / "docs" / "scale.md").read_text()
    assert page.count("<!-- table:") == page.count("<!-- end -->") == 8
    assert scale_tables.filled(page, content) == page
    assert scale_tables.results_page(content) == (ROOT / "results" / "scale.md").read_text()
    for name in NAMES:
        found = content["listed"][name]
        assert found["as_computed"]
        assert found["as_in_two_narrow_layers"]
        assert found["units"] == scale.decoder(name).units
        assert found["cpu_seconds"] < 60
