"""The large settings, and everything that says how one of their networks is trained."""

import dataclasses
from pathlib import Path
from typing import Any

from bmrs.price import KINDS

METHODS = ("none", "mean", "snr", "bmrs_n", "bmrs_u8", "bmrs_u4", "l2")
HUB = {"resnet50": "microsoft/resnet-50", "vit": "google/vit-base-patch16-224"}
VITS = {"base": (768, 12, 12), "small": (384, 12, 6), "tiny": (192, 12, 3)}  # width, blocks, heads

CHOICES = {
    "precision": ("fp32", "tf32", "bf16"),
    "step": ("eager", "compile", "graph"),
    "gates": ("paper", "all"),
    "price": KINDS,
    "schedule": ("paper", "constant", "linear", "cosine"),
    "augment": ("paper", "none", "crop", "shift"),
    "noise": ("example", "batch"),
    "fold": ("after", "before"),
    "vit": tuple(VITS),
}


@dataclasses.dataclass(frozen=True)
class Setting:
    """One network on one data set."""

    key: str
    network: str
    data: str


SETTINGS = {
    f"{network}-{data}": Setting(f"{network}-{data}", network, data)
    for network in HUB
    for data in ("cifar10", "tiny-imagenet")
}


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How a network is made, trained and pruned: runs are comparable where these agree. The paper's, unless said."""

    resolution: int = 224
    epochs: int = 100
    fine_tune: int = 10
    batch: int = 32
    learning_rate: float = 6.8e-4
    precision: str = "fp32"
    channels_last: bool = False
    step: str = "eager"  # how a training step runs
    gates: str = "paper"
    price: str = "layer"
    strength: float = 1.0
    noise: str = "example"  # one draw of the gates for each, or for the batch
    phi_lr: float = 1.0  # the gates' learning rate, times that of the weights
    log_sigma: float = -5.0  # where the gates begin
    warmup: int = 0  # steps over which the KL grows
    round_to: int | None = None  # widths are left at multiples of it
    prune_every: int = 1  # epochs
    fold: str = "after"  # the gates into the weights: after fine-tuning, or before
    schedule: str = "paper"
    augment: str = "paper"
    weights: str = HUB["resnet50"]
    vit_weights: str = HUB["vit"]
    scratch: bool = False
    vit: str = "base"  # of one from scratch
    patch: int = 16
    images: int | None = None  # so many of the training images, to try a recipe

    def __post_init__(self) -> None:
        for name, allowed in CHOICES.items():
            if getattr(self, name) not in allowed:
                given = getattr(self, name)
                raise ValueError(f"--{name}: unknown choice '{given}': choose from {', '.join(allowed)}.")

    def of(self, setting: Setting) -> "Recipe":
        """With what the paper does differently for each network settled."""
        vit = setting.network == "vit"
        changed: dict[str, Any] = {"weights": self.source(setting)}
        if self.schedule == "paper":
            changed["schedule"] = "linear" if vit else "constant"
        if self.augment == "paper":
            changed["augment"] = "crop" if vit else "none"
        return dataclasses.replace(self, **changed)

    def source(self, setting: Setting) -> str:
        """Where the network's weights come from: a folder, or a name on the Hugging Face hub."""
        return self.vit_weights if setting.network == "vit" else self.weights

    def to_json(self, setting: Setting) -> dict[str, Any]:
        """All of it that says something about this setting; a folder of weights by its name alone."""
        settled = self.of(setting)
        facts = dataclasses.asdict(settled)
        del facts["vit_weights"]
        folder = Path(settled.weights)
        facts["weights"] = "none, from scratch" if self.scratch else folder.name if folder.is_dir() else settled.weights
        if setting.network != "vit" or not self.scratch:
            del facts["vit"], facts["patch"]
        return facts
