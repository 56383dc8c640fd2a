import os
import re
from pathlib import Path

import pytest
import torch
from torch import distributed, nn

import bmrs
from bmrs.sharded import Sharded
from tests import sharded_worker
from tests.processes import in_group, script, together
from tests.sharded_worker import EPOCHS, SAVED, Training, Transformer, sentences

ROOT = Path(__file__).parent.parent
PAIRS = ("conv", "transformer", "recomputed", "gradients decide", "per batch", "blocks", "replicated", "momentum")
pytestmark = pytest.mark.skipif(not distributed.is_available(), reason="torch is built without processes")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where two processes wrote what they saw."""
    folder = tmp_path_factory.mktemp("sharded")
    together(2, in_group, sharded_worker.checks, folder)
    return folder


@pytest.fixture(scope="module")
def saw(folder):
    return [torch.load(folder / f"checks-{rank}.pt") for rank in range(2)]


def assert_same(got, want, tolerance=0.0):
    assert got.keys() == want.keys()
    for name in want:
        torch.testing.assert_close(got[name], want[name], rtol=0.0, atol=tolerance)


class TestEqualsDistributedDataParallel:
    """Which is compared with one process in tests/test_parallel.py."""

    @pytest.mark.parametrize("name", PAIRS)
    def test_the_same_units_go_in_every_round(self, saw, name):
        wrapped, sharded = (saw[0][name][how]["history"] for how in ("wrapped", "sharded"))
        assert wrapped == sharded == saw[1][name]["sharded"]["history"]
        sizes = {tuple(len(kept) for kept in round.values()) for round in wrapped}
        assert len(wrapped) == EPOCHS
        assert len(sizes) >= 2

    def test_whole_blocks_are_among_them(self, saw):
        (*_, last) = saw[0]["blocks"]["sharded"]["history"]
        assert sum(len(kept) for name, kept in last.items() if name.endswith(" blocks")) < 4

    @pytest.mark.parametrize("name", PAIRS)
    def test_the_weights_are_the_same(self, saw, name):
        # Both average the same gradients; sums over shards may be in another order. Gates are float32 in either.
        assert_same(saw[0][name]["sharded"]["weights"], saw[0][name]["wrapped"]["weights"], 1e-6)

    @pytest.mark.parametrize("name", PAIRS)
    def test_every_process_has_all_of_them_in_the_end(self, saw, name):
        assert_same(saw[1][name]["sharded"]["weights"], saw[0][name]["sharded"]["weights"])


class TestInShards:
    def test_a_process_holds_its_share_of_parameters_and_state(self, saw):
        for what in ("parameters", "state"):
            own = [one["seen"]["bytes"][what][0] for one in saw]
            everyone = saw[0]["seen"]["bytes"][what][1]
            # An odd row more here or there, and the gates.
            assert all(0.45 * everyone < one < 0.65 * everyone for one in own)

    def test_every_parameter_is_a_distributed_one(self, saw):
        assert all(saw[0]["seen"]["parameters"].values())

    def test_every_process_has_the_same_gates_and_draws_its_own(self, saw):
        first, second = (one["seen"] for one in saw)
        for own, other in zip(first["phi"], second["phi"], strict=True):
            torch.testing.assert_close(own, other, rtol=0.0, atol=0.0)
        assert (first["draw"] != second["draw"]).float().mean() > 0.9

    def test_the_network_computes_what_the_gathered_one_does(self, saw):
        for one in saw:
            torch.testing.assert_close(one["seen"]["outputs"], one["seen"]["gathered outputs"], rtol=0.0, atol=1e-6)

    def test_units_are_scored_without_gathering(self, saw):
        for one in saw:
            assert_same(one["seen"]["scores"], one["seen"]["gathered scores"])
            assert sum(map(len, one["seen"]["scores"].values())) == len(one["seen"]["ranked"])

    def test_gates_stay_float32_beside_weights_that_compute_in_16_bits(self, saw):
        for one in saw:
            assert one["bf16"]["drawn"] == (torch.float32, torch.bfloat16)
            assert one["bf16"]["types"] == {torch.float32}
            assert one["bf16"]["moved"]
            assert all(weight.isfinite().all() for weight in one["bf16"]["weights"].values())


class TestGathered:
    def test_the_network_is_plain(self, saw):
        for one in saw:
            assert not any(name.startswith("FSDP") for name in one["seen"]["classes"])
            assert not any(type(tensor).__name__ == "DTensor" for tensor in one["seen"]["state"]["model"].values())

    def test_its_state_is_that_of_a_pruner_without_shards(self, saw):
        training = Training("transformer", "alone", seed=5)
        training.pruner.load_state_dict(saw[0]["seen"]["state"])
        torch.testing.assert_close(training.outputs(), saw[0]["seen"]["outputs"], rtol=0.0, atol=1e-6)

    def test_a_removal_is_undone(self, saw):
        for one in saw:
            halved = sum(map(len, one["seen"]["halved"].values()))
            assert halved == len(one["seen"]["ranked"]) - len(one["seen"]["ranked"]) // 2
            assert one["seen"]["undone"]


class TestCheckpoints:
    def test_a_resumed_training_ends_as_one_that_was_not_disturbed(self, saw):
        for one in saw:
            assert one["saved"]["extra"] == {"epoch": SAVED}
            assert one["saved"]["again"]["kept"] == one["saved"]["at"]["kept"]
            assert torch.equal(one["saved"]["again"]["outputs"], one["saved"]["at"]["outputs"])
            assert one["saved"]["resumed"]["history"] == one["saved"]["undisturbed"]["history"][SAVED:]
            assert_same(one["saved"]["resumed"]["weights"], one["saved"]["undisturbed"]["weights"])

    @pytest.mark.parametrize("processes", [1, 3])
    def test_other_numbers_of_processes_go_on(self, saw, folder, processes):
        together(processes, in_group, sharded_worker.goes_on, folder)
        went = [torch.load(folder / f"went-{processes}-{rank}.pt") for rank in range(processes)]
        for one in went:
            assert one["kept"] == saw[0]["saved"]["at"]["kept"]
            torch.testing.assert_close(one["outputs"], saw[0]["saved"]["at"]["outputs"], rtol=0.0, atol=1e-6)
            assert one["history"] == went[0]["history"]
            assert_same(one["weights"], went[0]["weights"])
            assert all(own < (1 / processes + 0.15) * everyones for own, everyones in one["bytes"].values())


REFUSED = {
    "prune": "ValueError: the network is in shards, .*: shard it with bmrs.sharded.Sharded, use its own prune",
    "finish": "ValueError: the network is in shards",
    "state": "ValueError: the network is in shards",
    "load state": "ValueError: the network is in shards",
    "scores": "ValueError: the network is in shards",
    "fold": r"ValueError: the network is in shards, .*: fold its gates with Sharded.finish\(\)",
    "remove": "ValueError: model is in shards, .*: remove units from the whole network",
    "save": r"ValueError: model is in shards, .* inside Sharded.gathered\(\)",
    "load": "ValueError: model is in shards",
    "export": "ValueError: model is in shards, .*: export the whole network",
    "structures": "ValueError: model is in shards, .*: list its structures, or make its Pruner, before fully_shard",
    "pruner": "ValueError: model is in shards, .*: make the Pruner first, and shard with bmrs.sharded.Sharded",
    "twice": "ValueError: the network is in shards",
    "no pruner": r"TypeError: pruner must be a bmrs.Pruner of the plain network; got FSDPTransformer",
    "no shards": "ValueError: shard sharded nothing: call fully_shard on the network",
    "broken": "RuntimeError: no more",
    "there already": "FileExistsError: .*half exists already: give every checkpoint a folder of its own",
    "nowhere": "FileNotFoundError: there is no folder .*none",
    "no checkpoint": "ValueError: .* is damaged or no checkpoint",
    "extra": "ValueError: extra cannot be read again: give numbers, text, tensors",
    "another": "ValueError: state comes from an optimizer with other parameter groups: build it as it was",
}


class TestErrors:
    """One sentence that says what to do, on every process."""

    @pytest.mark.parametrize("attempt", REFUSED)
    def test_it_is_refused(self, saw, attempt):
        for one in saw:
            assert re.match(REFUSED[attempt], one["errors"]["said"][attempt])

    def test_nothing_changes(self, saw):
        for one in saw:
            assert one["errors"]["same"]
            assert one["errors"]["usable"]
            assert "new" not in one["errors"]["files"]
            assert not any(name.endswith(".part") for name in one["errors"]["files"])

    def test_without_processes(self):
        pruner = bmrs.Pruner(Transformer(), sentences()[0][:2])
        with pytest.raises(RuntimeError, match="there is no group of processes: call"):
            Sharded(pruner, lambda model: None)

    def test_copies_are_not_saved(self, tmp_path):
        distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'group'}", rank=0, world_size=1)
        try:
            training = Training("conv", "alone")
            training.pruner.follow(torch.optim.swa_utils.AveragedModel(training.net))
            sharded = Sharded(training.pruner, sharded_worker.shard_conv)
            with pytest.raises(ValueError, match=r"copies of the network \(EMA\) cannot be saved along"):
                sharded.save(tmp_path / "checkpoint")
        finally:
            distributed.destroy_process_group()


def test_the_example_goes_on_from_its_last_checkpoint(tmp_path):
    for epochs in (1, 3):
        arguments = ("--epochs", epochs, "--checkpoints", tmp_path / "checkpoints")
        together(2, script, ROOT / "examples" / "fully_shard.py", tmp_path / f"printed-{epochs}", *arguments)
    first, second, silent = ((tmp_path / f"printed-{name}").read_text() for name in ("1-0", "3-0", "3-1"))
    assert not silent
    seen = {int(n): int(p.replace(",", "")) for n, p in re.findall(r"epoch (\d+): ([\d,]+) parameters", second)}
    sizes = [tuple(map(int, pair)) for pair in re.findall(r"in_features=(\d+), out_features=(\d+)", second)]
    assert re.findall(r"epoch (\d+):", first) == ["1"]
    assert list(seen) == [2, 3]
    assert seen[3] == sum((i + 1) * o for i, o in sizes) < 65 * 128 + 129 * 64 + 65 * 10
    assert float(re.search(r"accuracy on the test set: ([\d.]+)%", second)[1]) > 70
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["1", "2", "3"]


def test_the_documentation_s_program_prunes(tmp_path):
    (program,) = re.findall(r"```py\n(.*?)```", (ROOT / "docs" / "many-machines.md").read_text(), re.DOTALL)
    shown = "print(report.units, sum(isinstance(layer, nn.Linear) for layer in model), extra)\n"
    path = tmp_path / "program.py"
    path.write_text(program.replace('"half"', repr(str(tmp_path / "half"))) + shown)
    together(2, script, path, tmp_path / "printed")
    for rank in range(2):
        units, layers, epoch = (tmp_path / f"printed-{rank}").read_text().split(maxsplit=2)
        assert 3 <= int(units) <= 8  # of 64, where the task needs four
        assert layers == "2"
        assert epoch == "{'epoch': 20}\n"


def test_plain_networks_are_not_taken_for_sharded_ones():
    assert not bmrs._checks.in_shards(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
