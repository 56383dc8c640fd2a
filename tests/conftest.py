import gc
import json
import os
import zlib
from pathlib import Path

import pytest
import torch

# Other random inputs are another whole number in the environment; the same one gives the same, in whatever order.
SEED = int(os.environ.get("BMRS_TEST_SEED", "0"))
torch.manual_seed(SEED)  # of what modules draw when they are imported

# Begun first, so that no process is left alone with one of them in the end.
LONG = (
    "test_engine_ray", "test_trainer", "test_sharded", "test_lightning", "test_parallel", "test_protocols", "test_docs",
    "test_browser", "test_exactness", "test_pruner_training", "test_pruner_wrapped", "test_train", "test_examples",
    "test_ensemble", "test_trained_network", "test_rules",
)  # fmt: skip


def pytest_collection_modifyitems(items):
    last = len(LONG)
    items.sort(key=lambda item: LONG.index(item.path.stem) if item.path.stem in LONG else last)


def pytest_collection_finish():
    """What is imported by now stays: searches for garbage need not look at it again and again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _seeded(request):
    torch.manual_seed(zlib.crc32(request.node.nodeid.encode()) + SEED)


@pytest.fixture(scope="session")
def golden():
    """Reference values computed with 110 digits: column name → float64 tensor."""
    rows = json.loads((Path(__file__).parent / "golden" / "posterior.json").read_text())["rows"]
    return {key: torch.tensor([row[key] for row in rows], dtype=torch.float64) for key in rows[0]}
