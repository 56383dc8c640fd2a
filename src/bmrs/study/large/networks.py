"""ResNet-50 and ViT as ``transformers`` builds them: pretrained with a new head, or from scratch."""

import contextlib
import copy
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from bmrs.structure.capture import first_line
from bmrs.study.large.recipe import VITS, Recipe, Setting

_POSITIONS = "vit.embeddings.position_embeddings"


def build(setting: Setting, classes: int, recipe: Recipe, seed: int, *, filled: bool = True) -> nn.Module:
    """The network on the processor, with a new head of this seed.

    ``filled=False``: only its shapes are needed, so no pretrained weights are read.
    """
    with torch.random.fork_rng(devices=[]), _quiet():
        torch.manual_seed(seed)
        source = recipe.source(setting)
        if recipe.scratch or not filled:
            config = None if recipe.scratch else _written(source)
            return _model(setting, config or _config(setting, recipe), classes, recipe.resolution)
        try:
            network = _class(setting).from_pretrained(
                source, num_labels=classes, ignore_mismatched_sizes=True, dtype=torch.float32
            )
        except Exception as problem:  # whatever a hub, a folder or a file in it does
            option = "--vit-weights" if setting.network == "vit" else "--weights"
            raise ValueError(
                f"the weights '{source}' cannot be loaded ({first_line(problem)}): give a folder that transformers "
                f"loads with {option}, or train from --scratch."
            ) from problem
        return _resized(setting, network, classes, recipe.resolution)


def name_of(setting: Setting, recipe: Recipe) -> str:
    """For people: which network it is, and where its weights began."""
    if setting.network == "vit":
        if recipe.scratch:
            return f"ViT-{recipe.vit}, patches of {recipe.patch}, from scratch (not pretrained)"
        return f"ViT from the weights '{Path(recipe.source(setting)).name}'"
    return "ResNet-50 from scratch (not pretrained)" if recipe.scratch else (
        f"ResNet-50 from the weights '{Path(recipe.source(setting)).name}'"
    )  # fmt: skip


def _class(setting: Setting) -> Any:
    import transformers

    return transformers.ViTForImageClassification if setting.network == "vit" else (
        transformers.ResNetForImageClassification
    )  # fmt: skip


def _config(setting: Setting, recipe: Recipe) -> Any:
    """Of a network from scratch, and of the one that lies on the hub."""
    import transformers

    if setting.network != "vit":
        return transformers.ResNetConfig()  # ResNet-50
    if not recipe.scratch:
        return transformers.ViTConfig()  # ViT-B/16
    width, blocks, heads = VITS[recipe.vit]
    return transformers.ViTConfig(
        hidden_size=width, num_hidden_layers=blocks, num_attention_heads=heads, intermediate_size=4 * width,
        patch_size=recipe.patch,
    )  # fmt: skip


def _written(source: str) -> Any:
    """The configuration in a folder of weights; None where the weights are not in a folder."""
    import transformers

    return transformers.AutoConfig.from_pretrained(source) if os.path.isdir(source) else None


def _model(setting: Setting, config: Any, classes: int, resolution: int) -> nn.Module:
    config = copy.deepcopy(config)
    config.num_labels = classes
    if setting.network == "vit":
        if resolution % config.patch_size:
            raise ValueError(
                f"--resolution must be a multiple of the ViT's patches of {config.patch_size} pixels; got {resolution}."
            )
        config.image_size = resolution
    network: nn.Module = _class(setting)(config)
    return network


def _resized(setting: Setting, network: Any, classes: int, resolution: int) -> nn.Module:
    """A ViT knows where a patch was by a table: one of another resolution is stretched to this one."""
    if setting.network != "vit" or network.config.image_size == resolution:
        made: nn.Module = network
        return made
    other = _model(setting, network.config, classes, resolution)
    state, wanted = network.state_dict(), other.state_dict()[_POSITIONS]
    first, grid = state[_POSITIONS][:, :1], state[_POSITIONS][:, 1:]  # the class token has no place
    old, new = round(grid.shape[1] ** 0.5), round((wanted.shape[1] - 1) ** 0.5)
    grid = grid.reshape(1, old, old, -1).permute(0, 3, 1, 2)
    grid = F.interpolate(grid, size=(new, new), mode="bicubic", align_corners=False)
    state[_POSITIONS] = torch.cat([first, grid.flatten(2).transpose(1, 2)], dim=1)
    other.load_state_dict(state)
    return other


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Loading draws bars, and reports on the head that is new on purpose."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(before)
        logging.enable_progress_bar()
