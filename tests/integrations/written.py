"""Reads back what trackers wrote, with their own readers."""

import json
from pathlib import Path

import pytest


def board(folder):
    """TensorBoard's event files: name → step → number."""
    reader = _reader(folder)
    return {name: {one.step: one.value for one in reader.Scalars(name)} for name in reader.Tags()["scalars"]}


def board_histograms(folder):
    """Name → step → (how many numbers, their sum, the smallest, the largest)."""
    reader = _reader(folder)
    found = {}
    for name in reader.Tags()["histograms"]:
        events = {one.step: one.histogram_value for one in reader.Histograms(name)}
        found[name] = {step: (h.num, h.sum, h.min, h.max) for step, h in events.items()}
    return found


def board_text(folder, name):
    return _reader(folder).Tensors(f"{name}/text_summary")[0].tensor_proto.string_val[0].decode()


def _reader(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(folder), size_guidance={"scalars": 0, "histograms": 0, "tensors": 0})
    reader.Reload()
    return reader


def wandb_records(folder):
    """Everything in the one offline run below a folder, as W&B's own messages."""
    import wandb
    from wandb.proto import wandb_internal_pb2
    from wandb.sdk.internal.datastore import DataStore

    wandb.finish()
    wandb.teardown()  # finish() returns a moment before the file is whole
    (file,) = Path(folder).rglob("run-*.wandb")
    store = DataStore()
    store.open_for_scan(str(file))
    records = []
    while data := store.scan_data():
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        records.append(record)
    store.close()
    return records


def wandb_rows(folder):
    """The history of the one offline run below a folder: a dict for each call of ``log``."""
    rows = []
    for record in wandb_records(folder):
        if record.WhichOneof("record_type") == "history":
            rows.append({})
            for item in record.history.item:
                *holders, name = item.nested_key or [item.key]
                inner = rows[-1]
                for holder in holders:  # of a histogram
                    inner = inner.setdefault(holder, {})
                inner[name] = json.loads(item.value_json)
    return rows


@pytest.fixture
def offline(monkeypatch, tmp_path):
    """W&B without a network, an account or a word."""
    for name in ("WANDB_DIR", "WANDB_PROJECT", "WANDB_RUN_ID", "WANDB_ENTITY"):
        monkeypatch.delenv(name, raising=False)
    settings = {"MODE": "offline", "SILENT": "true", "CONSOLE": "off", "ERROR_REPORTING": "false"}
    for name, value in settings.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    yield
    import wandb

    wandb.finish()
    wandb.teardown()
