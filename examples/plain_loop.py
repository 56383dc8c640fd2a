"""A plain training loop with bmrs: prunes while it trains, can be killed at any moment, and resumes where it was.

python examples/plain_loop.py --out runs/plain
"""

import argparse
import os
from pathlib import Path

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import bmrs

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--epochs", type=int, default=40)
parser.add_argument("--out", type=Path, default=Path("runs/plain"))
options = parser.parse_args()
options.out.mkdir(parents=True, exist_ok=True)
checkpoint = options.out / "checkpoint.pt"

x, y = (torch.tensor(part) for part in load_digits(return_X_y=True))
x = x.float().reshape(-1, 1, 8, 8) / 16 - 0.5
train, test = slice(0, 1400), slice(1400, None)

torch.manual_seed(0)
model = nn.Sequential(
    nn.Conv2d(1, 32, 3), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.BatchNorm2d(64), nn.ReLU(),
    nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 10),
)  # fmt: skip
optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
pruner = bmrs.Pruner(model, x[:2], optimizer, num_examples=1400)  # gates on every unit
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.epochs)

done = 0
if checkpoint.exists():
    state = torch.load(checkpoint, weights_only=True)
    pruner.load_state_dict(state["pruner"])  # network, gates and optimizer: the network shrinks to fit
    scheduler.load_state_dict(state["scheduler"])
    done = state["epoch"]

for epoch in range(done + 1, options.epochs + 1):
    model.train()
    for batch in torch.randperm(1400, generator=torch.Generator().manual_seed(epoch)).split(32):
        optimizer.zero_grad()
        F.cross_entropy(model(x[train][batch]), y[train][batch]).backward()
        optimizer.step()
    scheduler.step()
    report = pruner.prune()  # what the evidence does not support is gone, optimizer state and all
    accuracy = (model.eval()(x[test]).argmax(1) == y[test]).float().mean()
    print(f"epoch {epoch}: accuracy {accuracy:.1%}, {report.units} units, {report.parameters:,} parameters", flush=True)
    state = {"pruner": pruner.state_dict(), "scheduler": scheduler.state_dict(), "epoch": epoch}
    torch.save(state, f"{checkpoint}.part")
    os.replace(f"{checkpoint}.part", checkpoint)  # a kill here leaves the old one or the new one, never half of one

bmrs.save(pruner.finish(), options.out / "small.safetensors")  # an ordinary nn.Module
print(model)
