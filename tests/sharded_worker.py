"""What each process of tests/test_sharded.py does: see :func:`checks` and :func:`goes_on`."""

import copy
import os
from functools import partial

import torch
import torch.nn.functional as F
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import bmrs
from bmrs.sharded import Sharded
from tests import parallel_worker

EPOCHS = 4
SAVED = 2  # epochs, when they were saved


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 4, batch_first=True)
        self.norm = nn.LayerNorm(16)
        self.up, self.down = nn.Linear(16, 23), nn.Linear(23, 16)

    def forward(self, x):
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Transformer(nn.Module):
    def __init__(self, recompute=False):
        super().__init__()
        self.recompute = recompute
        self.table = nn.Embedding(11, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(16, 2)

    def forward(self, tokens):
        x = self.table(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute and self.training else block(x)
        return self.head(x.mean(1))


def sentences():
    tokens = torch.randint(11, (96, 5), generator=torch.Generator().manual_seed(1))
    return tokens, (tokens < 4).any(1).long()


def shard_conv(model, **options):
    for part in (model[0], model[4]):
        fully_shard(part, **options)
    fully_shard(model, **options)


def shard_blocks(model, **options):
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)


KINDS = {
    "conv": (parallel_worker.network, parallel_worker.data, shard_conv),
    "transformer": (Transformer, sentences, shard_blocks),
    "recomputed": (partial(Transformer, recompute=True), sentences, shard_blocks),
}


class Training:
    """A network that learns and shrinks: wrapped by DistributedDataParallel, in shards, or alone."""

    def __init__(
        self, kind, how, *, seed=0, late=False, optimizer=torch.optim.AdamW, shard=None, blocks=False, **options
    ):
        make, data, own_shard = KINDS[kind]
        (self.x, self.y), self.kind = data(), kind
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            # In float64 roundings are below Adam's epsilon, which else makes whole steps of gradients that are 0.
            self.net = make().to(torch.float32 if kind == "conv" else torch.float64)
        self.optimizer = None if late else optimizer(self.net.parameters(), lr=2e-2)
        self.blocks = blocks
        if blocks:
            found = bmrs.structures(self.net, self.x[:2])
            options["structures"] = [*found, *found.blocks]
        self.pruner = bmrs.Pruner(self.net, self.x[:2], self.optimizer, seed=7, **options)
        gates = self.pruner.bank.log_sigma.data  # begun at different places, they go in different rounds
        order = torch.randperm(len(gates), generator=torch.Generator().manual_seed(3))
        gates.copy_(torch.linspace(-4.0, 2.0, len(gates))[order])
        self.called, self.prune, self.finish = self.net, self.pruner.prune, self.pruner.finish
        if how == "wrapped":
            self.called = DistributedDataParallel(self.net)
        if how == "sharded":
            self.sharded = Sharded(self.pruner, shard or own_shard)
            self.prune, self.finish = self.sharded.prune, self.sharded.finish
        if late:
            self.optimizer = optimizer(self.net.parameters(), lr=2e-2)
            self.pruner.follow(self.optimizer)
        self.history = []

    def backward(self, batch):
        mine = batch[distributed.get_rank() :: distributed.get_world_size()]
        F.cross_entropy(self.called(self.x[mine]).float(), self.y[mine]).backward()

    def epochs(self, first=0, last=EPOCHS, *, clip=False):
        for epoch in range(first, last):
            order = torch.randperm(len(self.y), generator=torch.Generator().manual_seed(epoch))
            for batch in order.split(24):
                self.optimizer.zero_grad()
                self.backward(batch)
                if clip:
                    nn.utils.clip_grad_norm_(self.net.parameters(), 0.1)
                self.optimizer.step()
            self.backward(order[:24])  # gradients shrink along, and the next step is made of them
            self.prune()
            self.optimizer.step()
            self.history.append(self.kept())
        return self

    def kept(self):
        found = self.pruner.structures
        return {structure.name: structure.kept for structure in (*found, *(found.blocks if self.blocks else ()))}

    def outputs(self):
        """In evaluation, of this process."""
        self.net.eval()
        with torch.no_grad():
            made = self.net(self.x)
        self.net.train()
        return made

    def end(self):
        """The plain network that comes out."""
        return {"history": self.history, "weights": {name: t.clone() for name, t in self.finish().state_dict().items()}}


def checks(folder):
    """All that two processes can show; each writes down what it saw."""
    saw = {
        "conv": pair("conv"),
        "transformer": pair("transformer", clip=True),
        "recomputed": pair("recomputed", late=True),
        "gradients decide": pair("conv", criterion=bmrs.Gradient(2.0, 0.05)),
        "per batch": pair("transformer", noise="batch"),
        "replicated": pair("conv", shard=partial(shard_conv, mesh=mesh_of(1, 2))),
        "blocks": pair("transformer", blocks=True),
        "momentum": pair("conv", optimizer=partial(torch.optim.SGD, momentum=0.9)),
    }
    saw["saved"] = saved(folder)
    saw["bf16"] = bf16()
    saw["errors"] = errors(folder)
    saw["seen"] = seen()
    torch.save(saw, folder / f"checks-{distributed.get_rank()}.pt")


def mesh_of(*shape):
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "shards"))


def pair(kind, *, clip=False, shard=None, **options):
    """The same training wrapped and in shards."""
    wrapped = Training(kind, "wrapped", **options).epochs(clip=clip)
    sharded = Training(kind, "sharded", shard=shard, **options).epochs(clip=clip)
    return {"wrapped": wrapped.end(), "sharded": sharded.end()}


def saved(folder):
    """To the end, by way of a checkpoint; and from it once more."""
    undisturbed = Training("transformer", "sharded").epochs(0, SAVED)
    undisturbed.sharded.save(folder / "half", {"epoch": SAVED})
    kept, outputs = undisturbed.kept(), undisturbed.outputs()
    undisturbed.epochs(SAVED)
    resumed = Training("transformer", "sharded", seed=5)
    extra = resumed.sharded.load(folder / "half")
    again = {"kept": resumed.kept(), "outputs": resumed.outputs()}
    resumed.epochs(SAVED)
    return {"extra": extra, "again": again, "at": {"kept": kept, "outputs": outputs},
            "resumed": resumed.end(), "undisturbed": undisturbed.end()}  # fmt: skip


def goes_on(folder):
    """From the checkpoint of two processes, on any number of them."""
    training = Training("transformer", "sharded", seed=5)
    training.sharded.load(folder / "half")
    saw = {"kept": training.kept(), "outputs": training.outputs(), "bytes": held(training)}
    training.epochs(SAVED)
    saw |= training.end()
    torch.save(saw, folder / f"went-{distributed.get_world_size()}-{distributed.get_rank()}.pt")


def local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def held(training):
    """Bytes of parameters and of optimizer state: in this process, and of them all."""
    states = [value for state in training.optimizer.state.values() for value in state.values() if value.dim()]
    result = {}
    for what, tensors in (("parameters", list(training.net.parameters())), ("state", states)):
        storages = {local(t).untyped_storage().data_ptr(): local(t).untyped_storage().nbytes() for t in tensors}
        result[what] = sum(storages.values()), sum(t.numel() * t.element_size() for t in tensors)
    return result


def seen():
    """What is to be seen of a network that was pruned and is in shards again."""
    training = Training("transformer", "sharded").epochs(0, 2)
    bank = training.pruner.bank
    saw = {
        "parameters": {name: hasattr(p, "full_tensor") for name, p in training.net.named_parameters()},
        "bytes": held(training),
        "outputs": training.outputs(),
        "scores": training.pruner.scores(),
        "ranked": [tuple(unit) for unit in training.pruner.rank()],
        "phi": [p.to_local().clone() for p in (bank.mu, bank.log_sigma)],
    }
    training.net(training.x[:3])
    saw["draw"] = bank.draw(3).detach().clone()
    with training.sharded.gathered() as network:
        saw["gathered outputs"] = training.outputs()
        saw["gathered scores"] = training.pruner.scores()
        saw["classes"] = [type(module).__name__ for module in network.modules()]
        saw["state"] = copy.deepcopy(training.pruner.state_dict())
        before = training.kept()
        training.pruner.prune(fraction=0.5)
        saw["halved"] = training.kept()
        training.pruner.undo()
    saw["undone"] = training.kept() == before and torch.equal(training.outputs(), saw["outputs"])
    return saw


def bf16():
    """Weights that compute in 16 bits, beside gates that do not."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    training = Training("transformer", "sharded", shard=partial(shard_blocks, mp_policy=policy))
    drawn = []
    training.net.blocks[0].up.register_forward_hook(
        lambda module, args, output: drawn.append((training.pruner.bank.current().dtype, output.dtype))
    )
    before = training.pruner.bank.mu.to_local().clone()
    training.epochs(0, 2)
    bank = training.pruner.bank
    state = training.optimizer.state[bank.log_sigma]
    return {
        "drawn": drawn[0],
        "types": {bank.mu.dtype, bank.log_sigma.dtype, state["exp_avg"].dtype},
        "moved": bool((before[: len(bank.mu)] != bank.mu.to_local()).any()),
        "weights": training.end()["weights"],
    }


def errors(folder):
    """What is refused, and that nothing changes by it."""
    training = Training("transformer", "sharded", criterion=bmrs.L2(0.2))
    pruner, net, x = training.pruner, training.net, training.x
    before = [p.to_local().clone() for p in net.parameters()]
    plain = Transformer()
    fully_shard(plain)
    own_mesh = init_device_mesh("cpu", (distributed.get_world_size(),))

    def broken(model):
        fully_shard(model.blocks[0])
        raise RuntimeError("no more")

    later = Training("transformer", "alone")
    attempts = {
        "prune": pruner.prune,
        "finish": pruner.finish,
        "state": pruner.state_dict,
        "load state": lambda: pruner.load_state_dict({}),
        "scores": pruner.scores,
        "fold": pruner.bank.fold,
        "remove": lambda: bmrs.remove(net, {pruner.structures[0]: [0]}),
        "save": lambda: bmrs.save(net, folder / "a.safetensors"),
        "load": lambda: bmrs.load(net, folder / "a.safetensors"),
        "export": lambda: bmrs.export_program(net, x[:2]),
        "structures": lambda: bmrs.structures(plain, x[:2]),
        "pruner": lambda: bmrs.Pruner(plain, x[:2]),
        "twice": lambda: Sharded(pruner, shard_blocks),
        "no pruner": lambda: Sharded(plain, shard_blocks),
        "no shards": lambda: Sharded(later.pruner, lambda model: None),
        "broken": lambda: Sharded(later.pruner, broken),
        "there already": lambda: training.sharded.save(folder / "half"),
        "nowhere": lambda: training.sharded.load(folder / "none"),
        "no checkpoint": lambda: training.sharded.load(folder),
        "extra": lambda: training.sharded.save(folder / "new", {"here": folder}),
        "another": lambda: Training("conv", "sharded").sharded.load(folder / "half"),
    }
    assert own_mesh.size() == distributed.get_world_size()
    said = {}
    for name, attempt in attempts.items():
        try:
            attempt()
        except Exception as error:
            said[name] = f"{type(error).__name__}: {error}"
    same = all(torch.equal(a, p.to_local()) for a, p in zip(before, net.parameters(), strict=True))
    later.pruner.prune(0.3)  # plain as before
    usable = bool(later.net(x).isfinite().all()) and all(type(m).__name__[:4] != "FSDP" for m in later.net.modules())
    return {"said": said, "same": same, "usable": usable, "files": sorted(os.listdir(folder))}
