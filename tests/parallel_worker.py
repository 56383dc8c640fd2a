"""What each process of tests/test_parallel.py does; ``torchrun tests/parallel_worker.py FOLDER`` dies and goes on."""

import datetime
import os
import shutil
import signal
import sys
from inspect import signature
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import distributed, nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import bmrs

EPOCHS = 5
DIES_AT = (3, 2)  # epoch and step: three epochs were saved by then
LOGGED = ("find_unused_parameters", "gradient_as_bucket_view", "static_graph", "bucket_cap_bytes", "comm_hook",
          "broadcast_buffers", "backend_name", "world_size")  # fmt: skip
# Named anew in torch 2.13.
NO_BROADCAST = (
    "forward_sync_buffers"
    if "forward_sync_buffers" in signature(DistributedDataParallel).parameters
    else "broadcast_buffers"
)


def halved(state, bucket):
    """All-reduce by hand, counting its calls."""
    state["calls"] += 1
    return distributed.all_reduce(bucket.buffer() / 2, async_op=True).get_future().then(lambda done: done.value()[0])


def built_in(wrapper):
    wrapper._register_builtin_comm_hook(distributed.BuiltinCommHookType.ALLREDUCE)


# How network, Pruner and wrapper come together; arguments of the wrapper; its communication hook.
VARIANTS = {
    "the Pruner first": ("pruner first", {}, None),
    "the wrapper given": ("wrapper given", {}, None),
    "the wrapper first, the network given": ("network given", {"find_unused_parameters": True}, None),
    "the network inside another": ("inside", {"gradient_as_bucket_view": True}, built_in),
    "small buckets": ("pruner first", {"bucket_cap_mb": 0.002, NO_BROADCAST: False}, None),
    "a static graph and a hook": (
        "wrapper given",
        {"static_graph": True},
        lambda wrapper: wrapper.register_comm_hook(wrapper.state, halved),
    ),
}


class Outer(nn.Module):
    def __init__(self, network):
        super().__init__()
        self.network = network

    def forward(self, x):
        return self.network(x)


def data():
    x = torch.randn(96, 1, 6, 6, generator=torch.Generator().manual_seed(1))
    return x, (x[:, 0, 2:4, 2:4].sum((1, 2)) > 0).long()


def network(seed=0, unused=False):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        # No bias before the norm: its gradient is nothing but rounding, which Adam turns into whole steps.
        model = nn.Sequential(
            nn.Conv2d(1, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(128, 16), nn.ReLU(),
            nn.Linear(16, 2),
        )  # fmt: skip
    if unused:
        model[0].register_parameter("unused", nn.Parameter(torch.ones(3)))
    return model


class Training:
    """A network, its optimizer, its Pruner and, among several processes, its wrapper."""

    def __init__(self, how="alone", arguments=None, seed=0, unused=False):
        def wrapped(module):
            wrapper = DistributedDataParallel(module, **(arguments or {}))
            wrapper.passes, wrapper.state = [], {"calls": 0}
            wrapper.register_forward_hook(lambda module, args, output: wrapper.passes.append(len(output)))
            return wrapper

        self.net = network(seed, unused)
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=2e-2)
        self.called = wrapped(self.net) if how in ("wrapper given", "network given") else self.net
        given = self.called if how == "wrapper given" else self.net
        self.pruner = bmrs.Pruner(given, data()[0][:2], self.optimizer, seed=7)
        # Begun at different places, the gates go in different rounds.
        gates = self.pruner.bank.log_sigma.data
        order = torch.randperm(len(gates), generator=torch.Generator().manual_seed(3))
        gates.copy_(torch.linspace(-4.0, 2.0, len(gates))[order])
        if how in ("pruner first", "inside"):
            self.called = wrapped(Outer(self.net) if how == "inside" else self.net)
        self.history = []

    def step(self, x, y, rank, world):
        """One step on this process's share of a batch."""
        self.optimizer.zero_grad()
        F.cross_entropy(self.called(x[rank::world]), y[rank::world]).backward()
        self.optimizer.step()

    def step_of_both(self, x, y):
        """What two processes do in one step, done by one."""
        self.optimizer.zero_grad()
        bank, draws = self.pruner.bank, self.pruner.bank.draws
        for rank in range(2):
            bank.rank, bank.draws = rank, draws
            (F.cross_entropy(self.called(x[rank::2]), y[rank::2]) / 2).backward()
        bank.rank = None
        self.optimizer.step()

    def epochs(self, step, first=0, last=EPOCHS, after=lambda epoch: None):
        x, y = data()
        for epoch in range(first, last):
            order = torch.randperm(len(y), generator=torch.Generator().manual_seed(epoch))
            for number, batch in enumerate(order.split(24)):
                step(x[batch], y[batch], epoch, number)
            self.pruner.prune()
            self.history.append(self.kept())
            after(epoch)
        return self

    def kept(self):
        return {structure.name: structure.kept for structure in self.pruner.structures}

    def weights(self):
        return {name: p.detach().clone() for name, p in self.net.named_parameters() if "unused" not in name}

    def save(self, path, epoch):
        """Complete or not at all."""
        torch.save({"pruner": self.pruner.state_dict(), "epoch": epoch + 1, "history": self.history}, f"{path}.part")
        os.replace(f"{path}.part", path)

    def resume(self, path):
        state = torch.load(path)
        self.pruner.load_state_dict(state["pruner"])
        self.history = state["history"]
        return state["epoch"]


def train(folder, dying=False):
    """Train from the checkpoint, if there is one, to the end. ``dying``: once, in the middle of an epoch."""
    rank, world = distributed.get_rank(), distributed.get_world_size()
    training = Training("pruner first")
    path = folder / "checkpoint.pt"
    first = training.resume(path) if path.exists() else 0

    def step(x, y, epoch, number):
        if dying and rank == 1 and (epoch, number) == DIES_AT:
            shutil.copy(path, folder / "died.pt")
            os.kill(os.getpid(), signal.SIGKILL)
        training.step(x, y, rank, world)

    training.epochs(step, first, after=lambda epoch: training.save(path, epoch) if rank == 0 else None)
    end = {"first": first, "history": training.history, "weights": training.weights()}
    torch.save(end, folder / f"end-{world}-{rank}.pt")


def checks(folder):
    """All that two processes can show; each writes down what it saw."""
    rank = distributed.get_rank()
    saw = {"variants": {name: variant(*how) for name, how in VARIANTS.items()}}
    saw["powerSGD"] = power_sgd()
    saw["resumed"] = {how: resumed(folder / "died.pt", how) for how in ("pruner first", "wrapper given")}
    saw["differing"] = differing(rank)
    saw["other parameters"] = other_parameters(rank)
    saw["groups"] = groups(rank)
    saw["seed"] = bmrs.Pruner(network(), data()[0][:2], seed=2**64 - 1 - rank).bank.seed
    torch.save(saw, folder / f"checks-{rank}.pt")


def variant(how, arguments, hook):
    training = Training(how, arguments, unused="find_unused_parameters" in arguments)
    wrapper, rank = training.called, distributed.get_rank()
    if hook is not None:
        hook(wrapper)
    before = wrapper._get_ddp_logging_data()
    training.epochs(lambda x, y, epoch, number: training.step(x, y, rank, 2))
    after = wrapper._get_ddp_logging_data()
    saw = {
        "history": training.history,
        "weights": training.weights(),
        "logged before": {name: before.get(name) for name in LOGGED},
        "logged after": {name: after.get(name) for name in LOGGED},
        "passes": len(wrapper.passes),
        "calls": wrapper.state["calls"],
        "buffers": {name: b.clone() for name, b in training.net.named_buffers() if b.is_floating_point()},
        "draw": training.pruner.bank.draw(4).detach(),
    }
    # The plain network goes on in the same wrapper.
    x = data()[0]
    training.pruner.finish()
    wrapper(x[rank::2]).square().mean().backward()
    saw["finished gradients"] = {
        name: p.grad.clone() for name, p in training.net.named_parameters() if "unused" not in name
    }
    training.optimizer.step()
    saw["finished weights"] = training.weights()
    wrapper.eval()
    saw["finished outputs"] = wrapper(x).detach(), training.net(x).detach()
    return saw


def power_sgd():
    """A hook that keeps tensors of its own for every bucket."""
    training = Training("pruner first")
    state = PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2, min_compression_rate=0.5,
                          orthogonalization_epsilon=1e-8)  # fmt: skip
    training.called.register_comm_hook(state, powerSGD_hook)
    training.epochs(lambda x, y, epoch, number: training.step(x, y, distributed.get_rank(), 2))
    return {"history": training.history, "weights": training.weights(), "compressed": state.compression_stats()[0]}


def resumed(path, how):
    training = Training(how, seed=5)
    first = training.resume(path)
    training.epochs(lambda x, y, epoch, number: training.step(x, y, distributed.get_rank(), 2), first)
    return {"first": first, "history": training.history, "weights": training.weights()}


def differing(rank):
    """Parameters that differ on one process, by little or in nothing but their order; mended; then a removal undone."""
    training = Training("pruner first")
    training.epochs(lambda x, y, *_: training.step(x, y, rank, 2), last=2)
    pruner, weight = training.pruner, training.net[4].weight
    right, state = weight.detach().clone(), {name: t.clone() for name, t in training.net.state_dict().items()}
    saw = {"errors": []}
    for wrong in (right + 1e-6 * (right == right[0, 0]), right.flip(0)):
        if rank == 1:
            weight.data.copy_(wrong)
        try:
            pruner.prune(0.5)
        except RuntimeError as error:
            saw["errors"].append(str(error))
        weight.data.copy_(right)
    now = training.net.state_dict()
    saw["intact"] = all(torch.equal(now[name], state[name]) for name in state) and now.keys() == state.keys()
    pruner.prune(0.5)
    saw["halved"] = training.kept()
    pruner.undo()
    training.epochs(lambda x, y, *_: training.step(x, y, rank, 2), first=2)
    return {**saw, "history": training.history, "weights": training.weights()}


def other_parameters(rank):
    """A network with more parameters on one process than on the other."""
    network = nn.Sequential(*[nn.Linear(2, 2, bias=number == 0) for number in range(1 + rank)])
    try:
        bmrs.parallel.agreed(torch.ones(3, dtype=torch.bool), network)
    except RuntimeError as error:
        return str(error)
    return ""


def groups(rank):
    """Each process in a group of its own, with a network of its own."""
    own = [distributed.new_group([number]) for number in range(2)][rank]
    training = Training("pruner first", {"process_group": own}, seed=rank)
    training.epochs(lambda x, y, *_: training.step(x, y, 0, 1), last=3)
    return {"history": training.history, "weights": training.weights()}


if __name__ == "__main__":
    distributed.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    train(Path(sys.argv[1]), dying=not (Path(sys.argv[1]) / "died.pt").exists())
    distributed.destroy_process_group()
