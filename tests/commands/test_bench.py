import pytest
import torch

import bmrs
from bmrs.inspection import make_model
from bmrs.study import timing
from tests.commands.made import answer, run, user_files


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = user_files(tmp_path_factory.mktemp("place"))
    (folder / "wide.py").write_text(
        "from torch import nn\n\n\ndef make():\n"
        "    return nn.Sequential(\n"
        "        nn.Linear(20, 3000), nn.ReLU(), nn.Linear(3000, 2000), nn.ReLU(), nn.Linear(2000, 2)\n    )\n"
    )
    network = make_model(f"{folder / 'wide.py'}:make")
    structures = bmrs.structures(network, torch.randn(1, 20))
    bmrs.remove(network, {structure: range(structure.units * 9 // 10) for structure in structures})
    bmrs.save(network, folder / "small.safetensors")
    return folder


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(timing, "BUDGET", 100.0)


def test_the_small_network_is_measured_beside_the_whole_one(place):
    found = answer(run("bench", f"{place / 'wide.py'}:make", "--input", "1x20", "--small", place / "small.safetensors",
                       "--batch", "1,32", "--threads", "1", "--device", "cpu", "--json"))  # fmt: skip
    size = found["size"]
    assert size["whole"]["multiply_adds"] == 20 * 3000 + 3000 * 2000 + 2000 * 2
    assert size["small"]["multiply_adds"] == 20 * 300 + 300 * 200 + 200 * 2
    assert size["small"]["parameters"] == 21 * 300 + 301 * 200 + 201 * 2
    assert size["whole"]["weights_mib"] == pytest.approx(4 * size["whole"]["parameters"] / 2**20)
    assert [(row["network"], row["batch"]) for row in found["times"]] == [
        ("whole", 1), ("small", 1), ("whole", 32), ("small", 32),
    ]  # fmt: skip
    for row in found["times"]:
        low, high = row["ms_spread"]
        assert 0 < low <= row["ms"] <= high
    # A hundredth of the work: however busy the machine, it does not take as long.
    assert found["times"][3]["faster"] > 2
    assert found["provenance"]["threads"] == 1


def test_a_network_alone_for_people(place):
    said = run("bench", f"{place / 'net.py'}:plain", "--input", "3x20", "--device", "cpu")
    assert said.exit_code == 0, said.output
    assert "parameters: 554" in said.output
    assert "faster" not in said.output
    assert "│     3 │ whole   │ eager │" in said.output


def test_inputs_by_name(place):
    found = answer(run("bench", f"{place / 'net.py'}:Named", "--integer-input", "tokens=2x5", "--integers", "20",
                       "--input", "scale=2x1", "--batch", "4", "--json"))  # fmt: skip
    assert [row["batch"] for row in found["times"]] == [4]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((), "--input must give the shape of at least one input"),
        (("--input", "1x7"), "the network does not take inputs of these shapes and fails on them"),
        (("--input", "1x20", "--batch", "1,many"), "--batch must be whole numbers of at least 1, as 1,16,64"),
        (("--input", "1x20", "--small", "none.safetensors"), "--small: there is no file none.safetensors"),
        (("--input", "1x20", "--small", "{place}/small.safetensors"), "--small: "),
        (("--input", "1x20", "--small", "{place}/net.py"), "is damaged or no safetensors file"),
        (("--input", "1x20", "--device", "abacus"), "--device: unknown device 'abacus'"),
    ],
)
def test_bad_input_gives_one_sentence(place, arguments, sentence):
    result = run("bench", f"{place / 'net.py'}:plain", *(argument.format(place=place) for argument in arguments))
    assert result.exit_code == 2, result.output
    assert sentence in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
