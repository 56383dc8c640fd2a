"""What gates cost a large network, and what their removal gains: the paper's Table 4 and what it leaves out."""

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import bmrs
from bmrs.study import timing
from bmrs.study.counting import Counting
from bmrs.study.large import networks
from bmrs.study.large.placement import gated, short
from bmrs.study.large.recipe import Recipe, Setting
from bmrs.study.large.steps import Step, logits, optimizer_for, precise, relaid

CLASSES = {"cifar10": 10, "tiny-imagenet": 200}
TRAINED_ON = {"cifar10": 40_000, "tiny-imagenet": 80_000}  # images in an epoch


def measure(
    setting: Setting,
    recipe: Recipe,
    *,
    device: str = "cpu",
    data_dir: Path | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Any]:
    """As :func:`bmrs.study.timing.measure`: without gates, with them, and after units are gone. Images are random, and
    weights too, which makes no difference to the time.
    """
    begun, place, recipe = time.perf_counter(), torch.device(device), recipe.of(setting)
    shape = (3, recipe.resolution, recipe.resolution)
    chance = torch.Generator().manual_seed(0)
    x = torch.randn(recipe.batch, *shape, generator=chance).to(place)
    y = torch.randint(CLASSES[setting.data], (recipe.batch,), generator=chance).to(place)
    if recipe.channels_last:
        x = x.contiguous(memory_format=torch.channels_last)

    def built() -> nn.Module:
        network = networks.build(setting, CLASSES[setting.data], recipe, 0, filled=False).to(place).eval()
        relaid(network, None, recipe.channels_last)
        return network

    with precise(recipe):
        smaller = built()
        structures = gated(bmrs.structures(smaller, x[:2]), recipe.gates)
        counting = Counting(smaller, structures, x[:2])
        whole = bmrs.cost.multiply_adds(smaller, x[:1])
        gone, share, why = timing.shares(setting, counting, recipe.gates == "paper")
        going = {s: torch.randperm(s.units, generator=chance)[: gone[s.name]].tolist() for s in structures}
        bmrs.remove(smaller, going)
        relaid(smaller, None, recipe.channels_last)
        variants = {"none": Variant(built(), x, y, recipe), "gated": Variant(built(), x, y, recipe, recipe.gates),
                    "removed": Variant(smaller, x, y, recipe)}  # fmt: skip
        runs, rounds = timing.compared(setting.key, variants, progress)
    steps = math.ceil(TRAINED_ON[setting.data] / recipe.batch)
    epochs = {run["method"]: round(steps * run["ms"] / 1e3, 2) for run in runs if run["mode"] == "train_step"}
    return {
        "setting": {
            "network": setting.network,
            "data": setting.data,
            "layers": {short(name): own.stop - own.start for name, own in counting.layers.items()},
            "parameters": counting.parameters,
            "multiply_adds": whole,
            "made": networks.name_of(setting, recipe),
            **recipe.to_json(setting),
            "seconds": time.perf_counter() - begun,
            "networks": len(variants),
            "rounds": rounds,
            "seconds_per_epoch": epochs,
            "removed": {
                "why": why, "share": share, "parameters": bmrs.cost.parameters(smaller),
                "multiply_adds": bmrs.cost.multiply_adds(smaller, x[:1]),
            },
        },
        "runs": runs,
    }  # fmt: skip


class Variant(timing.Variant):
    """A large network and its step, as the study trains it. ``gates``: where, if it has any."""

    def __init__(self, network: nn.Module, x: Tensor, y: Tensor, recipe: Recipe, gates: str = "") -> None:
        self.network, self.x, self.y, self.recipe = network, x, y, recipe
        self.optimizer = optimizer_for(network, recipe, x.device)
        pruner = None
        if gates:
            chosen = gated(bmrs.structures(network, x[:2]), gates)
            pruner = bmrs.Pruner(network, x[:2], self.optimizer, structures=chosen, price="layer", phi_lr=1.0, seed=0)
        self.training = Step(network, self.optimizer, recipe, pruner)

    def forward(self) -> None:
        logits(self.training.called, self.x, self.recipe)

    @torch.no_grad()
    def inference(self) -> None:
        logits(self.network, self.x, self.recipe)

    def step(self) -> None:
        self.training(self.x, self.y)
