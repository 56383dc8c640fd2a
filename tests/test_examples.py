"""The examples run, and stay short enough to be read."""

import re
import runpy
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import kills
from tests import integrations  # noqa: F401  transformers cannot be imported without its stand-in

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_an_example_is_short_and_says_how_to_run_it(path):
    text = path.read_text()
    assert len(text.splitlines()) < 60
    assert path.name in text.split('"""')[1]


def test_a_killed_loop_ends_as_if_nothing_had_happened():
    [run] = kills.run(kills=1, epochs=8, seed=1)["runs"]  # results/kills.md has twenty
    assert run["killed_after_epochs"] > 1
    assert run["same_structure"]
    assert run["same_weights"]


def test_a_pretrained_resnet_is_fine_tuned_and_pruned(tmp_path, monkeypatch, capsys):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.ResNetConfig(embedding_size=16, hidden_sizes=[32, 64, 64, 64], depths=[1, 1, 1, 1])
    transformers.ResNetForImageClassification(config).save_pretrained(tmp_path)
    options = ["--weights", str(tmp_path), "--epochs", "10", "--size", "32", "--images", "640"]
    monkeypatch.setattr(sys, "argv", ["resnet50.py", *options])
    runpy.run_path(str(EXAMPLES / "resnet50.py"))
    said = capsys.readouterr().out
    before, after = (int(re.search(rf"{which}: .* ([\d,]+) parameters", said)[1].replace(",", "")) for which in
                     ("whole, not yet trained", "fine-tuned and pruned"))  # fmt: skip
    assert after < 0.9 * before
