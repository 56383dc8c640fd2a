"""Train and prune a network in shards (FSDP2); killed and started again, it goes on from the last epoch.

torchrun --nproc-per-node 2 --max-restarts 3 examples/fully_shard.py
"""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard

import bmrs
from bmrs.sharded import Sharded

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=12)
parser.add_argument("--checkpoints", type=Path, default=Path("fully_shard"))  # on a disk all nodes see


def shard(model):
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    fully_shard(model)


options, device = parser.parse_args(), "cuda" if torch.cuda.is_available() else "cpu"
if device == "cuda":
    torch.cuda.set_device(distributed.get_node_local_rank())
distributed.init_process_group("nccl" if device == "cuda" else "gloo")
rank, world = distributed.get_rank(), distributed.get_world_size()
x, y = (torch.tensor(part, device=device) for part in load_digits(return_X_y=True))
x = x.float() / 16

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10)).to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
sharded = Sharded(bmrs.Pruner(model, x[:2], optimizer), shard)

options.checkpoints.mkdir(exist_ok=True)
done = [int(path.name) for path in options.checkpoints.iterdir() if path.name.isdigit()]
first = sharded.load(options.checkpoints / str(max(done))) if done else 0
for epoch in range(first, options.epochs):
    order = torch.randperm(1437, generator=torch.Generator().manual_seed(epoch))[: 1437 // world * world]
    for batch in order[rank::world].split(16):  # each process gets its share
        optimizer.zero_grad()
        F.cross_entropy(model(x[batch]), y[batch]).backward()
        optimizer.step()
    report = sharded.prune()  # gathered, shrunk, in shards again
    sharded.save(options.checkpoints / str(epoch + 1), epoch + 1)
    if rank == 0:
        print(f"epoch {epoch + 1}: {report.parameters:,} parameters", flush=True)
model = sharded.finish().eval()  # whole and plain, on every process
if rank == 0:
    print(f"{model}\naccuracy on the test set: {(model(x[1437:]).argmax(1) == y[1437:]).float().mean():.1%}")
distributed.destroy_process_group()
