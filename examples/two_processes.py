"""Train and prune on several processes; killed and started again, they go on from the last epoch.

torchrun --nproc-per-node 2 --max-restarts 3 examples/two_processes.py
"""

import argparse
import os

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import bmrs

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=12)
parser.add_argument("--checkpoint", default="two_processes.pt")  # on a disk all nodes see
options = parser.parse_args()

device = f"cuda:{os.environ['LOCAL_RANK']}" if torch.cuda.is_available() else "cpu"
distributed.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
rank = distributed.get_rank()
x, y = (torch.tensor(part, device=device) for part in load_digits(return_X_y=True))
x = x.float() / 16
train = TensorDataset(x[:1437], y[:1437])
sampler = DistributedSampler(train)  # each process gets its share
loader = DataLoader(train, batch_size=16, sampler=sampler)

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10)).to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
pruner = bmrs.Pruner(model, x[:2], optimizer)
wrapper = DistributedDataParallel(model)  # before the Pruner, or after: either will do

first = 0
if os.path.exists(options.checkpoint):
    state = torch.load(options.checkpoint, map_location=device)
    pruner.load_state_dict(state["pruner"])
    first = state["epoch"]
for epoch in range(first, options.epochs):
    sampler.set_epoch(epoch)
    for inputs, labels in loader:
        optimizer.zero_grad()
        F.cross_entropy(wrapper(inputs), labels).backward()
        optimizer.step()
    report = pruner.prune()  # on every process; all remove the same units
    if rank == 0:
        print(f"epoch {epoch + 1}: {report.parameters:,} parameters", flush=True)
        torch.save({"pruner": pruner.state_dict(), "epoch": epoch + 1}, options.checkpoint + ".part")
        os.replace(options.checkpoint + ".part", options.checkpoint)  # complete, or not at all

model = pruner.finish().eval()
if rank == 0:
    accuracy = (model(x[1437:]).argmax(1) == y[1437:]).float().mean()
    print(f"{model}\naccuracy on the test set: {accuracy:.1%}")
distributed.destroy_process_group()
