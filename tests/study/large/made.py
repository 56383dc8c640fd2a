"""Small networks and images in the formats of the large ones."""

import numpy as np
import pytest
import torch

from tests import integrations  # noqa: F401  transformers cannot be imported without its stand-in


def write_cifar(folder, per_file=12):
    """CIFAR-10's binary files, of images whose colour says their class and some noise."""
    chance = np.random.default_rng(0)
    (folder / "cifar10" / "cifar-10-batches-bin").mkdir(parents=True)
    n, labels = per_file, np.arange(per_file) % 10
    for name in [*(f"data_batch_{k}.bin" for k in range(1, 6)), "test_batch.bin"]:
        images = (20 * labels[:, None, None, None] + chance.integers(0, 40, (n, 3, 32, 32))).astype(np.uint8)
        images[:, 1] = 255 - images[:, 1]
        rows = np.concatenate([labels.astype(np.uint8)[:, None], images.reshape(n, -1)], axis=1)
        (folder / "cifar10" / "cifar-10-batches-bin" / name).write_bytes(rows.tobytes())


def write_resnet(folder):
    """A ResNet of bottlenecks, pretrained for a thousand classes that nobody has."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.ResNetConfig(embedding_size=8, hidden_sizes=[16, 32], depths=[1, 2], num_labels=7)
    transformers.ResNetForImageClassification(config).save_pretrained(folder)


def write_vit(folder, image_size=32, patch_size=8):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.ViTConfig(
        hidden_size=24, num_hidden_layers=2, num_attention_heads=4, intermediate_size=32, image_size=image_size,
        patch_size=patch_size, num_labels=7,
    )  # fmt: skip
    transformers.ViTForImageClassification(config).save_pretrained(folder)
