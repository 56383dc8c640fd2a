import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

import bmrs
from tests import parallel_worker
from tests.parallel_worker import DIES_AT, EPOCHS, VARIANTS, Training, data, network
from tests.processes import free_port, in_group, together

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.skipif(not distributed.is_available(), reason="torch is built without processes")


def torchrun(*arguments):
    """One node of several, or all there is: its agent, which starts the processes and starts them again."""
    # Else restarted processes may meet in a store that still has the addresses of those before them.
    own_store = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    environment = {**os.environ, **own_store, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", *map(str, arguments)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, cwd=ROOT,
    )  # fmt: skip


def ended(agent):
    """What an agent's processes printed, when they have done all they should."""
    printed, said = agent.communicate(timeout=300)
    assert agent.returncode == 0, said[-8000:]
    return printed, said


@pytest.fixture(scope="module")
def death(tmp_path_factory):
    """Two nodes of one process each. One is killed; both begin again. Their folder, and what the agents said."""
    folder = tmp_path_factory.mktemp("died")
    nodes = ("--nnodes=2", "--nproc-per-node=1", "--max-restarts=1", "--rdzv-backend=c10d", "--local-addr=127.0.0.1")
    meeting = f"--rdzv-endpoint=127.0.0.1:{free_port()}"
    agents = [torchrun(*nodes, meeting, "tests/parallel_worker.py", folder) for _ in range(2)]
    return folder, [ended(agent)[1] for agent in agents]


@pytest.fixture(scope="module")
def saw(death):
    """What two processes of one node wrote down in tests/parallel_worker.py."""
    folder = death[0]
    together(2, in_group, parallel_worker.checks, folder)
    return [torch.load(folder / f"checks-{rank}.pt") for rank in range(2)]


@pytest.fixture(scope="module")
def alone():
    """One process that does what two do, step by step: structures after each round, and the weights in the end."""
    training = Training()
    training.epochs(lambda x, y, *_: training.step_of_both(x, y))
    return training.history, training.weights()


def assert_same(got, want, tolerance=0.0):
    assert got.keys() == want.keys()
    for name in want:
        torch.testing.assert_close(got[name], want[name], rtol=0.0, atol=tolerance)


class TestTwoProcesses:
    def test_the_reference_removes_units_in_several_rounds(self, alone):
        sizes = [tuple(len(kept) for kept in round.values()) for round in alone[0]]
        assert len(set(sizes)) >= 4
        assert min(sizes[-1]) >= 3  # and leaves something to compare

    @pytest.mark.parametrize("name", VARIANTS)
    def test_they_remove_the_same_units_as_one_process_in_every_round(self, saw, alone, name):
        for one in saw:
            assert one["variants"][name]["history"] == alone[0]

    @pytest.mark.parametrize("name", VARIANTS)
    def test_their_weights_are_those_of_one_process_on_the_whole_batch(self, saw, alone, name):
        first, second = (one["variants"][name]["weights"] for one in saw)
        assert_same(first, second)
        assert_same(first, alone[1], 1e-6)

    def test_each_process_draws_gates_of_its_own(self, saw):
        first, second = (one["variants"]["the Pruner first"]["draw"] for one in saw)
        assert first.shape == second.shape
        assert (first != second).float().mean() > 0.9

    @pytest.mark.parametrize("name", VARIANTS)
    def test_the_wrapper_keeps_its_settings(self, saw, name):
        for one in saw:
            assert one["variants"][name]["logged after"] == one["variants"][name]["logged before"]

    def test_the_settings_are_those_that_were_given(self, saw):
        logged = {name: one["logged after"] for name, one in saw[0]["variants"].items()}
        assert logged["the wrapper first, the network given"]["find_unused_parameters"] == 1
        assert logged["the network inside another"]["gradient_as_bucket_view"] == 1
        assert logged["the network inside another"]["comm_hook"] == "BuiltinCommHookType.ALLREDUCE"
        assert logged["a static graph and a hook"]["static_graph"] == 1
        assert logged["small buckets"]["bucket_cap_bytes"] == int(0.002 * 2**20)
        assert logged["small buckets"]["broadcast_buffers"] == 0
        assert logged["a static graph and a hook"]["comm_hook"] == "halved"

    @pytest.mark.parametrize("name", VARIANTS)
    def test_hooks_on_the_wrapper_stay(self, saw, name):
        passes = EPOCHS * 4
        for one in saw:
            assert one["variants"][name]["passes"] == passes
        assert saw[0]["variants"]["a static graph and a hook"]["calls"] >= passes

    def test_a_hook_that_keeps_tensors_of_every_bucket_goes_on(self, saw):
        first, second = (one["powerSGD"] for one in saw)
        assert_same(first["weights"], second["weights"])
        assert first["history"] == second["history"]
        assert len({str(kept) for kept in first["history"]}) >= 4
        assert first["compressed"] > 1.5

    @pytest.mark.parametrize("name", VARIANTS)
    def test_the_plain_network_trains_on_in_the_same_wrapper(self, saw, name):
        first, second = (one["variants"][name] for one in saw)
        assert not any("bmrs" in parameter for parameter in first["finished weights"])
        assert_same(first["finished gradients"], second["finished gradients"])
        assert_same(first["finished weights"], second["finished weights"])
        moved = [(first["finished weights"][n] != first["weights"][n]).any() for n in first["finished weights"]]
        assert all(moved)
        torch.testing.assert_close(*first["finished outputs"], rtol=0.0, atol=0.0)

    def test_parameters_that_differ_are_an_error_on_both_that_changes_nothing(self, saw):
        for one in saw:
            errors = one["differing"]["errors"]
            assert len(errors) == 2
            assert all("1 of 9 parameters differ between processes, '4.weight' first" in error for error in errors)
            assert one["differing"]["intact"]

    def test_mended_and_with_a_removal_undone_they_go_on_as_if_nothing_had_been(self, saw, alone):
        for one in saw:
            assert sum(map(len, one["differing"]["halved"].values())) == 19 - 9  # half of them
            assert one["differing"]["history"] == alone[0]
            assert_same(one["differing"]["weights"], alone[1], 1e-6)

    def test_another_number_of_parameters_is_an_error_on_both(self, saw):
        for one in saw:
            assert "parameters differ between processes" in one["other parameters"]

    def test_groups_of_processes_train_networks_of_their_own(self, saw):
        first, second = (one["groups"] for one in saw)
        assert len(first["history"]) == len(second["history"]) == 3
        assert not torch.equal(first["weights"]["4.bias"][:3], second["weights"]["4.bias"][:3])

    def test_the_seed_is_that_of_the_first(self, saw):
        assert saw[0]["seed"] % 2**64 == saw[1]["seed"] % 2**64 == 2**64 - 1


class TestDeath:
    def test_a_process_that_dies_leaves_whole_checkpoints(self, death):
        folder, said = death
        assert any("exitcode: -9" in text for text in said)
        assert not list(folder.glob("*.part"))

    def test_two_nodes_that_began_again_end_as_one_that_was_not_disturbed(self, death, saw):
        for rank, one in enumerate(saw):
            undisturbed, end = one["variants"]["the Pruner first"], torch.load(death[0] / f"end-2-{rank}.pt")
            assert end["first"] == DIES_AT[0]  # what was lost: less than an epoch
            assert end["history"] == undisturbed["history"]
            assert_same(end["weights"], undisturbed["weights"])

    def test_two_processes_go_on_to_the_same_end(self, death, saw):
        for one in saw:
            undisturbed = one["variants"]["the Pruner first"]
            for resumed in one["resumed"].values():
                assert resumed["first"] == DIES_AT[0]
                assert resumed["history"] == undisturbed["history"]
                assert_same(resumed["weights"], undisturbed["weights"])

    def test_one_process_goes_on_to_the_end(self, death, alone):
        training = Training(seed=5)
        first = training.resume(death[0] / "died.pt")
        assert training.kept() == alone[0][first - 1]
        training.epochs(lambda x, y, *_: training.step(x, y, 0, 1), first)
        assert len(training.history) == EPOCHS
        assert training.history[:first] == alone[0][:first]
        assert training.pruner.finish()(data()[0]).isfinite().all()

    def test_three_processes_go_on_to_the_end(self, death, alone, tmp_path):
        shutil.copy(death[0] / "died.pt", tmp_path / "checkpoint.pt")
        together(3, in_group, parallel_worker.train, tmp_path)
        ends = [torch.load(tmp_path / f"end-3-{rank}.pt") for rank in range(3)]
        assert ends[0]["history"] == ends[1]["history"] == ends[2]["history"]
        assert len(ends[0]["history"]) == EPOCHS
        assert ends[0]["history"][: DIES_AT[0]] == alone[0][: DIES_AT[0]]
        for other in ends[1:]:
            assert_same(other["weights"], ends[0]["weights"])


def test_the_example_goes_on_where_it_was_killed(tmp_path):
    checkpoint = tmp_path / "digits.pt"
    agent = torchrun("--standalone", "--nproc-per-node=2", "--max-restarts=1", "examples/two_processes.py",
                     "--epochs", 6, "--checkpoint", checkpoint)  # fmt: skip
    first = agent.stdout.readline()
    while agent.poll() is None and not checkpoint.exists():
        time.sleep(0.01)
    workers = Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()
    os.kill(int(workers[0]), signal.SIGKILL)
    printed, said = ended(agent)
    assert "exitcode: -9" in said
    lines = re.findall(r"epoch (\d+): ([\d,]+) parameters", first + printed)
    seen = {int(epoch): int(parameters.replace(",", "")) for epoch, parameters in lines}
    sizes = [tuple(map(int, pair)) for pair in re.findall(r"in_features=(\d+), out_features=(\d+)", printed)]
    assert list(seen) == [1, 2, 3, 4, 5, 6]
    assert len(lines) <= 7  # killed between an epoch's line and its checkpoint it does that epoch again
    assert seen[6] < seen[1] == 65 * 128 + 129 * 64 + 65 * 10
    assert seen[6] == sum((i + 1) * o for i, o in sizes)
    assert float(re.search(r"accuracy on the test set: ([\d.]+)%", printed)[1]) > 70
    assert [path.name for path in tmp_path.iterdir()] == ["digits.pt"]


@pytest.fixture
def group(tmp_path):
    """A group of this one process."""

    def begin(name):
        distributed.init_process_group("gloo", init_method=f"file://{tmp_path / name}", rank=0, world_size=1)

    begin("first")
    yield begin
    distributed.destroy_process_group()


class TestOneProcess:
    def test_mixed_precision_of_the_wrapper_is_refused_before_anything_changes(self, group):
        from torch.nn.parallel.distributed import _MixedPrecision

        model = network()
        names = list(model.state_dict())
        wrapper = DistributedDataParallel(model, mixed_precision=_MixedPrecision(param_dtype=torch.bfloat16))
        with pytest.raises(ValueError, match="cannot be used here with mixed_precision"):
            bmrs.Pruner(wrapper, data()[0][:2])
        assert list(model.state_dict()) == names

    def test_wrappers_of_an_ended_group_are_left_alone(self, group):
        model = network()
        old = DistributedDataParallel(model)
        distributed.destroy_process_group()
        group("second")
        pruner = bmrs.Pruner(model, data()[0][:2])
        new = DistributedDataParallel(model)
        assert bmrs.parallel.wrappers(model) == [new] != [old]
        pruner.prune(0.5)
        new(data()[0]).sum().backward()
        assert model[0].weight.grad.shape == model[0].weight.shape

    def test_wrappers_of_other_networks_are_not_found(self, group):
        class Own(DistributedDataParallel):
            pass

        model, other = network(), network()
        wrapper, _foreign = Own(nn.Sequential(nn.Identity(), model)), DistributedDataParallel(other)
        assert bmrs.parallel.wrappers(model) == [wrapper]

    def test_no_wrapper_is_found_without_processes(self):
        assert bmrs.parallel.wrappers(network()) == []


def test_synchronised_batch_norm_shrinks():
    model = nn.SyncBatchNorm.convert_sync_batchnorm(network())
    pruner = bmrs.Pruner(model, data()[0][:2])
    report = pruner.prune(0.5)
    left = {row.name: row.left for row in report.structures}["0"]
    assert isinstance(model[1], nn.SyncBatchNorm)
    assert left < 8
    assert model[1].num_features == len(model[1].running_mean) == len(model[1].weight) == left
    model(data()[0]).sum().backward()
    assert model[1].weight.grad.shape == (left,)
