import pytest
import torch

from tests.commands.made import answer, run, user_files

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_train_prune_and_bench(tmp_path):
    net = f"{user_files(tmp_path) / 'net.py'}:make"
    common = ("train", net, "--data", tmp_path / "data.npz", "--epochs", "10", "--fine-tune", "1", "--learning-rate",
              "0.01", "--phi-rate", "7", "--strength", "0.1", "--device", "cuda")  # fmt: skip
    whole = answer(run(*common, "--out", tmp_path / "whole", "--json"))
    assert run(*common, "--out", tmp_path / "run", INTERRUPTED_AT="80").exit_code == 130
    resumed = answer(run(*common, "--out", tmp_path / "run", "--json"))
    assert resumed["judged"] == whole["judged"]
    assert resumed["units"]["1"]["after"] < resumed["units"]["1"]["before"]
    half = answer(run("prune", net, "--checkpoint", tmp_path / "run", "--fraction", "0.5", "--device", "cuda", "--out",
                      tmp_path / "half", "--json"))  # fmt: skip
    assert half["units"]["1"]["after"] <= resumed["units"]["1"]["after"] // 2 + 1
    found = answer(run("bench", net, "--input", "64x20", "--small", tmp_path / "half" / "small.safetensors", "--json"))
    assert all(row["memory_mib"] > 0 for row in found["times"])


def test_bf16(tmp_path):
    net = f"{user_files(tmp_path) / 'net.py'}:plain"
    found = answer(run("train", net, "--data", tmp_path / "data.npz", "--epochs", "6", "--precision", "bf16",
                       "--learning-rate", "0.01", "--out", tmp_path / "run", "--json"))  # fmt: skip
    assert found["judged"]["pruned"]["test"] > 0.55
