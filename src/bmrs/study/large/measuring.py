"""What a network costs when it runs: latency and throughput on the GPU and the processor, as it is, captured,
compiled and in onnxruntime; and memory. The whole network and the pruned one take turns in one process.
"""

import importlib.util
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import bmrs
from bmrs.structure.capture import first_line
from bmrs.study.large.deadline import Deadline
from bmrs.study.large.recipe import Recipe
from bmrs.study.large.steps import precise
from bmrs.study.provenance import provenance
from bmrs.study.timing import Turn, race, spread

WAYS = ("eager", "graph", "compiled", "onnxruntime")
BATCHES = (1, 256)
_NEEDED = {"eager": 10.0, "graph": 10.0, "compiled": 150.0, "onnxruntime": 60.0}  # seconds, at most as a rule
_LONGEST = 20_000.0  # milliseconds a single pass may take


def measure(
    make: Mapping[str, Callable[[], nn.Module]],
    shape: Sequence[int],
    recipe: Recipe,
    *,
    device: str,
    ways: Sequence[str] = WAYS,
    batches: Sequence[int] = BATCHES,
    deadline: Deadline | None = None,
    tell: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """``make``: by name, what makes each network, on the processor and in float32. ``shape``: of an image.

    Times are medians over rounds, with their 10th and 90th percentile; what was not measured says why.
    """
    deadline = deadline or Deadline()
    rows: list[dict[str, Any]] = []
    skipped: list[dict[str, Any]] = []
    places = list(dict.fromkeys((torch.device(device), torch.device("cpu"))))
    with precise(recipe, search=True):
        networks = {p: {name: _placed(one().eval(), p, recipe) for name, one in make.items()} for p in places}
        for way, place in sorted(
            product(ways, places), key=lambda pair: pair[0] == "compiled"
        ):  # what takes long, last
            why = _impossible(way, place) or ("" if deadline.allows(_NEEDED[way]) else "no time was left")
            if not why:
                tell(f"measuring: {way} on {place.type}")
                try:
                    for row in _raced(networks[place], way, place, shape, recipe, batches):
                        (skipped if "why" in row else rows).append(row)
                except Exception as problem:  # of a compiler, an exporter, a driver: the others still count
                    why = first_line(problem)
            if why:
                skipped.append({"how": way, "device": place.type, "why": why})
    return {"runs": rows, "skipped": skipped, "threads": torch.get_num_threads(), "machine": provenance()["machine"],
            "precision": {place.type: _precision(place, recipe) for place in places}}  # fmt: skip


def merged(before: Mapping[str, Any] | None, now: dict[str, Any]) -> dict[str, Any]:
    """With what was measured before in other ways, on the same machine."""
    if before is None or before.get("machine") != now["machine"] or before["precision"] != now["precision"]:
        return now

    def key(row: Mapping[str, Any]) -> tuple[Any, ...]:
        return row["how"], row["device"], row.get("batch")

    anew = {key(row) for row in now["runs"]}
    there = [row for row in before["runs"] if key(row) not in anew] + now["runs"]
    tried = {(row["how"], row["device"]) for row in (*there, *now["skipped"])}
    skipped = [row for row in before["skipped"] if (row["how"], row["device"]) not in tried]
    measured = {(row["how"], row["device"]) for row in there}
    now_skipped = [row for row in now["skipped"] if "a batch of" in row["why"] or (row["how"], row["device"])
                   not in measured]  # fmt: skip
    return {**now, "runs": there, "skipped": [*skipped, *now_skipped]}


def _impossible(way: str, place: torch.device) -> str:
    if way == "graph" and place.type != "cuda":
        return "only a GPU has CUDA graphs"
    if way == "onnxruntime" and place.type != "cpu":
        return "measured on the processor"
    missing = [name for name in ("onnxruntime", "onnxscript") if importlib.util.find_spec(name) is None]
    return f"{missing[0]} is not installed" if way == "onnxruntime" and missing else ""


def _precision(place: torch.device, recipe: Recipe) -> str:
    """A processor computes in float32, whatever the network was trained in."""
    return "fp32" if place.type == "cpu" else recipe.precision


def _placed(network: nn.Module, place: torch.device, recipe: Recipe) -> nn.Module:
    network = network.to(place)
    if _precision(place, recipe) == "bf16":
        network = network.to(torch.bfloat16)
    if recipe.channels_last:
        network = network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return network


def _raced(
    networks: Mapping[str, nn.Module], way: str, place: torch.device, shape: Sequence[int], recipe: Recipe,
    batches: Sequence[int],
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """A row for each network and batch."""
    kind = torch.bfloat16 if _precision(place, recipe) == "bf16" else torch.float32
    one = 0.0  # milliseconds of the slowest for a single image
    with tempfile.TemporaryDirectory() as folder:
        ready = {name: _ready(network, way, place, shape, Path(folder) / name) for name, network in networks.items()}
        for batch in sorted(batches):
            if one * batch > _LONGEST:
                why = f"a batch of {batch} would take about {one * batch / 1e3:.0f} s"
                yield {"how": way, "device": place.type, "why": why}
                continue
            x = torch.randn(batch, *shape, device=place, dtype=kind)
            if recipe.channels_last:
                x = x.contiguous(memory_format=torch.channels_last)
            turns = [Turn(lambda: None, prepared(x)) for prepared in ready.values()]
            for turn in turns:
                turn.warm(3 if one * batch < 1e3 else 1)
            # A recorded pass has its memory before it runs.
            memory = [None if way == "graph" else turn.peak_mib(place) for turn in turns]
            times = race(turns, place)
            for name, own, mib in zip(ready, times, memory, strict=True):
                ms = statistics.median(own)
                one = max(one, ms) if batch == min(batches) else one
                yield {
                    "network": name, "how": way, "device": place.type, "batch": batch, "ms": ms,
                    "ms_spread": list(spread(own)), "images_per_second": 1e3 * batch / ms, "memory_mib": mib,
                }  # fmt: skip
        torch.compiler.reset()


Prepared = Callable[[Tensor], Callable[[], None]]


def _ready(network: nn.Module, way: str, place: torch.device, shape: Sequence[int], stem: Path) -> Prepared:
    """What makes a pass over a batch into something that can be called again and again."""
    if way == "onnxruntime":
        return _in_onnxruntime(network, shape, stem.with_suffix(".onnx"))
    called: Any = torch.compile(network, dynamic=False) if way == "compiled" else network

    def prepared(x: Tensor) -> Callable[[], None]:
        @torch.no_grad()
        def run() -> None:
            called(x)

        return _captured(run) if way == "graph" else run

    return prepared


def _captured(run: Callable[[], None]) -> Callable[[], None]:
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def _in_onnxruntime(network: nn.Module, shape: Sequence[int], path: Path) -> Prepared:
    import onnxruntime  # type: ignore[import-untyped]

    bmrs.export_onnx(network, torch.randn(2, *shape), path)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name

    def prepared(x: Tensor) -> Callable[[], None]:
        given = {name: x.contiguous().numpy()}
        return lambda: session.run(None, given)

    return prepared


def faster(measured: Mapping[str, Any], device: str, batch: int, how: str = "") -> float | None:
    """How many times as many images a second the pruned network takes as the whole one; each at its best, unless said.

    >>> rows = [{"network": n, "how": "eager", "device": "cuda", "batch": 256, "images_per_second": v}
    ...         for n, v in (("whole", 100.0), ("pruned", 400.0))]
    >>> faster({"runs": rows}, "cuda", 256)
    4.0
    """
    best: dict[str, float] = {}
    for row in measured.get("runs", ()):
        if (row["device"], row["batch"]) == (device, batch) and how in ("", row["how"]):
            best[row["network"]] = max(best.get(row["network"], 0.0), row["images_per_second"])
    return best["pruned"] / best["whole"] if {"pruned", "whole"} <= best.keys() else None
