import gc
import json
from pathlib import Path

import pytest
import torch


def pytest_collection_finish():
    """What is imported by now stays: searches for garbage need not look at it again and again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def golden():
    """Reference values computed with 110 digits: column name → float64 tensor."""
    rows = json.loads((Path(__file__).parent / "golden" / "posterior.json").read_text())["rows"]
    return {key: torch.tensor([row[key] for row in rows], dtype=torch.float64) for key in rows[0]}
