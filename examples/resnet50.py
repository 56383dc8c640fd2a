"""Fine-tune an ImageNet ResNet-50 on another task and prune it on the way: a smaller, faster network for that task.

python examples/resnet50.py --weights microsoft/resnet-50        # a name on the Hugging Face hub, or a folder
"""

import argparse
import copy
import time

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from transformers import ResNetForImageClassification

import bmrs

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--weights", default="microsoft/resnet-50")
parser.add_argument("--epochs", type=int, default=10)
parser.add_argument("--images", type=int, default=1797)
parser.add_argument("--size", type=int, default=64)
options = parser.parse_args()
device = "cuda" if torch.cuda.is_available() else "cpu"

x, y = (torch.tensor(part)[: options.images] for part in load_digits(return_X_y=True))  # stands for your own images
x = x.float().reshape(-1, 1, 8, 8).expand(-1, 3, -1, -1) / 16
x = F.interpolate(x, size=(options.size, options.size), mode="bilinear").sub(0.45).div(0.225).to(device)
(x_train, x_test), (y_train, y_test) = (t.tensor_split([len(x) * 4 // 5]) for t in (x, y.to(device)))


def train(model: nn.Module) -> None:
    model.train()
    for batch in torch.randperm(len(x_train)).split(32):
        optimizer.zero_grad()
        F.cross_entropy(model(x_train[batch]).logits, y_train[batch]).backward()
        optimizer.step()


@torch.no_grad()
def test(model: nn.Module) -> str:
    for _ in range(5):  # the first ones warm up
        start = time.perf_counter()
        accuracy = (model.eval()(x_test).logits.argmax(1) == y_test).float().mean().item()
        speed = len(x_test) / (time.perf_counter() - start)
    return f"accuracy {accuracy:.1%}, {bmrs.cost.parameters(model):,} parameters, {speed:,.0f} images a second"


torch.manual_seed(0)
model = ResNetForImageClassification.from_pretrained(options.weights, num_labels=10, ignore_mismatched_sizes=True)
whole = copy.deepcopy(model.to(device))
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
# A short fine-tuning: the gates begin closer to letting go, and move faster, than in a long training.
pruner = bmrs.Pruner(model, x[:2], optimizer, phi_lr=100, log_sigma=-2.0, warmup=2 * len(x_train) // 32)
for epoch in range(1, options.epochs - 1):
    train(model)
    print(f"epoch {epoch}: {pruner.prune().parameters:,} parameters", flush=True)
model = pruner.finish(fine_tune=lambda small: [train(small) for _ in range(2)])
print(f"whole, not yet trained: {test(whole)}\nfine-tuned and pruned: {test(model)}")
