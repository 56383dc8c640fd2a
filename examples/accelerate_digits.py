"""Accelerate: a loop of your own for handwritten digits, with accumulated gradients, that prunes and can be resumed.

Run with ``python examples/accelerate_digits.py`` or ``accelerate launch``; what was interrupted goes on where it was.
"""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import bmrs

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=20)
parser.add_argument("--folder", type=Path, default=Path("runs/accelerate_digits"))
options = parser.parse_args()

torch.manual_seed(0)
digits, order = load_digits(), torch.randperm(1797)
x, y = torch.tensor(digits.data, dtype=torch.float32)[order] / 16, torch.tensor(digits.target)[order]
loader = DataLoader(TensorDataset(x[:1500], y[:1500]), 25, shuffle=True)
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
pruner = bmrs.Pruner(model, x[:2], optimizer, phi_lr=20, strength=0.3)  # + gates, before prepare
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step / 1000))

accelerator = Accelerator(gradient_accumulation_steps=2)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
done = max((int(saved.name) for saved in options.folder.glob("*")), default=0)
if done:
    accelerator.load_state(options.folder / str(done))  # the network takes the shapes it had

for epoch in range(done + 1, options.epochs + 1):
    model.train()
    for images, labels in loader:
        with accelerator.accumulate(model):
            accelerator.backward(F.cross_entropy(model(images), labels))
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    report = pruner.prune()  # + what the evidence does not support is gone
    accelerator.print(f"epoch {epoch}: {report.units} units, {report.parameters:,} parameters")
    accelerator.save_state(options.folder / str(epoch))

network = pruner.finish().eval()  # + an ordinary nn.Sequential, smaller
accuracy = (network(x[1500:].to(accelerator.device)).argmax(1).cpu() == y[1500:]).float().mean()
accelerator.print(network, f"{options.epochs} epochs: {accuracy:.1%} right", sep="\n")
