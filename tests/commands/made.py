"""A user's files: a network, data and a loss, as small as they may be; and the command line that is given them."""

import json

import numpy as np
import torch
from typer.testing import CliRunner

from bmrs.cli import app

FILE = """
import os, signal
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from beside import WIDTH


class Dying(nn.Module):
    '''Ends the program at the training pass whose number the environment names.'''

    def __init__(self):
        super().__init__()
        self.passes = 0

    def forward(self, x):
        if self.training and not torch.compiler.is_compiling() and x.shape[0] == 32:
            self.passes += 1
            if os.environ.get("KILLED_AT") == str(self.passes):
                os.kill(os.getpid(), signal.SIGKILL)
            if os.environ.get("INTERRUPTED_AT") == str(self.passes):
                raise KeyboardInterrupt
        return x


def make():
    return nn.Sequential(Dying(), nn.Linear(20, WIDTH), nn.Dropout(0.1), nn.ReLU(), nn.Linear(WIDTH, 2))


def plain():
    return nn.Sequential(nn.Linear(20, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 2))


def one():
    return nn.Sequential(nn.Linear(20, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1))


def image():
    return nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 2))


class Named(nn.Module):
    '''Two inputs by keyword, and an output as libraries wrap it.'''

    def __init__(self):
        super().__init__()
        self.words, self.out = nn.Embedding(20, 8), nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 2))

    def forward(self, tokens, scale):
        return {"logits": self.out(self.words(tokens).mean(1) * scale)}


class Sentences(Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, index):
        return {"tokens": torch.full((5,), index % 20), "scale": torch.ones(1)}, index % 2


def sentences():
    return Sentences(), Sentences()


def labels_loss(output, target):
    return nn.functional.cross_entropy(output["logits"], target)


def pairs(n=64):
    x = torch.randn(n, 20, generator=torch.Generator().manual_seed(n))
    return TensorDataset(x, (x[:, 0] > 0).long())


def datasets():
    return pairs(), pairs(30), pairs(20)


def loaders():
    return DataLoader(pairs(), 16, shuffle=True), DataLoader(pairs(30), 16)


class Spoilt(Sentences):
    def __getitem__(self, index):
        x = torch.randn(20)
        return x / 0 if index == 37 else x, index % 2


def spoilt():
    return Spoilt(), pairs(30)


def nan():
    network = plain()
    nn.init.constant_(network[0].weight, float("nan"))
    return network


def one_part():
    return pairs()


def triples():
    x = torch.randn(8, 20)
    return TensorDataset(x, x, x), TensorDataset(x, x, x)


def failing():
    return torch.randn(3) + torch.randn(2)


def nan_loss(output, target):
    return output.sum() * float("nan")


def lenet():
    from bmrs.study import networks

    return networks.lenet5(1, 10)


def nothing():
    return nn.Sequential(nn.Linear(20, 2))
"""


def user_files(folder):
    """Writes net.py, a module beside it, and data.npz, in which one of twenty inputs matters."""
    folder.mkdir(exist_ok=True)
    (folder / "net.py").write_text(FILE)
    (folder / "beside.py").write_text("WIDTH = 24\n")
    (folder / "broken.py").write_text("import no_such_module\n")
    (folder / "syntax.py").write_text("def make(:\n")
    x, y = data()
    np.savez(folder / "data.npz", x_train=x[:384].numpy(), y_train=y[:384].numpy(), x_test=x[384:].numpy(),
             y_test=y[384:].numpy())  # fmt: skip
    return folder


def data():
    x = torch.randn(512, 20, generator=torch.Generator().manual_seed(0))
    return x, (x[:, 0].abs() > 0.67).long()


def run(*arguments, **environment):
    """Wide, so that no sentence is wrapped."""
    settings = {"COLUMNS": "200", "NO_COLOR": "1", **environment}
    return CliRunner().invoke(app, [str(argument) for argument in arguments], env=settings)


def answer(result):
    """What --json printed."""
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)
