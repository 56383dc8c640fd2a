"""Lightning: a convolutional network for handwritten digits, pruned by a callback while it is fitted.

Run with ``python examples/lightning_digits.py``; needs ``pip install bmrs[lightning] scikit-learn``.
"""

import argparse

import lightning.pytorch as L
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

from bmrs.integrations.lightning import PruningCallback


class Digits(L.LightningModule):
    """Any LightningModule: nothing in it knows of pruning."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            *(nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Flatten(), nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 10)),
        )

    def training_step(self, batch, index):
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch, index):
        x, y = batch
        self.log("accuracy", (self.net(x).argmax(1) == y).float().mean(), prog_bar=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=2e-3)


def main(epochs: int) -> None:
    L.seed_everything(0)
    images, labels = load_digits(return_X_y=True)
    digits = TensorDataset(torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16, torch.tensor(labels))
    train, test = random_split(digits, [1500, 297])

    pruning = PruningCallback(torch.zeros(2, 1, 8, 8), phi_lr=20, strength=0.3, start_epoch=epochs // 3)
    trainer = L.Trainer(max_epochs=epochs, callbacks=[pruning], accelerator="cpu", logger=False)
    trainer.fit(Digits(), DataLoader(train, 50, shuffle=True), DataLoader(test, 297))

    network = pruning.finish()  # an ordinary nn.Sequential, smaller
    print(network, pruning.reports[-1], sep="\n\n")
    accuracy = float(trainer.callback_metrics["accuracy"])
    print(f"\n{epochs} epochs: {accuracy:.1%} right with {sum(p.numel() for p in network.parameters()):,} parameters")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=20)
    main(parser.parse_args().epochs)
