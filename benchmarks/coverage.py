"""Every architecture of the zoo through bmrs and through Torch-Pruning: what is found, and whether removal is exact.

    python -m benchmarks.coverage                    # both, then results/coverage.json and results/coverage.md
    python -m benchmarks.coverage --only timm/nest   # those whose name contains this, printed, nothing written

40 % of the units of every structure go, in float64, from a network whose constant parameters were given random values
(see ``benchmarks.peer``). The reference is the same network with the weights that read the removed units set to zero.
Each model has a time limit. What is done is kept in runs/coverage, so that a run goes on where it was stopped.
"""

import argparse
import copy
import json
import signal
import statistics
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import bmrs
from benchmarks import peer
from benchmarks.architectures import ARCHITECTURES
from bmrs.study.provenance import provenance

FRACTION = 0.4
EXACT = {torch.float64: 1e-8, torch.float32: 1e-3}


@dataclass
class Result:
    """One architecture through bmrs."""

    name: str
    verdict: str  # exact, wrong, crash, hang, nothing
    found: int = 0
    removable: int = 0
    share: float = 0.0  # of the parameters, in structures found
    discover_seconds: float = 0.0
    verify_seconds: float = 0.0
    error: float | None = None
    moved: float | None = None  # how far removal moved the outputs: a test through nothing shows nothing
    message: str = ""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    def ring(*_: object) -> None:
        raise TimeoutError

    signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def judge(name: str, limit: float) -> Result:
    try:
        with time_limit(limit):
            return _judge(name)
    except TimeoutError:
        return Result(name, "hang", discover_seconds=limit)
    except Exception as problem:
        return Result(name, "crash", message=f"{type(problem).__name__}: {problem}"[:300])


def _judge(name: str) -> Result:
    model, inputs, whole, dtype = peer.subject(name)
    start = time.perf_counter()
    structures = bmrs.structures(model, inputs)
    discovered = time.perf_counter() - start
    result = Result(name, "nothing", len(structures), 0, structures.share, discovered)
    if not len(structures):
        result.message = "; ".join(list(structures.frozen)[:2])
        return result
    start = time.perf_counter()
    structures.verify()
    result.verify_seconds = time.perf_counter() - start
    removable = [structure for structure in structures if structure.status == "exact"]
    result.removable = len(removable)
    kept = [f"{structure.name}: {structure.status}" for structure in structures if structure.status != "exact"]
    result.message = "; ".join(kept)[:300]
    if not removable:
        return result
    generator = torch.Generator().manual_seed(0)
    chosen = {}
    for structure in removable:
        count = min(structure.units - 1, max(1, round(FRACTION * structure.units)))
        chosen[structure] = torch.randperm(structure.units, generator=generator)[:count].tolist()
    masked = copy.deepcopy(model)
    silence(masked, chosen)
    reference = peer.outputs(masked, inputs)
    bmrs.remove(model, chosen)
    result.error = peer.difference(peer.outputs(model, inputs), reference)
    result.moved = peer.difference(whole, reference)
    result.verdict = "exact" if result.error <= EXACT[dtype] else "wrong"
    return result


@torch.no_grad()
def silence(model: torch.nn.Module, chosen: dict[bmrs.Structure, list[int]]) -> None:
    """Zero the weights that read these units."""
    tensors = dict(model.named_parameters(remove_duplicate=False))
    for structure, units in chosen.items():
        for name, dim in structure.consumers:
            indices = structure.indices((name, dim))
            columns = [index for unit in units for index in indices[unit]]
            tensors[name].index_fill_(dim, torch.tensor(columns), 0.0)


# --- both, kept as they come ------------------------------------------------------------------------------------------


def collect(file: Path, names: list[str], judge_one: Callable[[str], Any]) -> dict[str, dict[str, Any]]:
    """Judge what the file does not have yet, a line each."""
    file.parent.mkdir(parents=True, exist_ok=True)
    lines = file.read_text().splitlines() if file.exists() else []
    known = {row["name"]: row for row in map(json.loads, lines)}
    for name in names:
        if name not in known:
            known[name] = asdict(judge_one(name))
            with file.open("a") as out:
                out.write(json.dumps(known[name]) + "\n")
            print(json.dumps(known[name])[:220], flush=True)
    return {name: known[name] for name in names}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="architectures whose name contains this")
    parser.add_argument("--side", choices=("both", "bmrs", "peer"), default="both")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds for one model in bmrs")
    parser.add_argument("--peer-limit", type=float, default=60.0, help="seconds for one model in Torch-Pruning")
    parser.add_argument("--kept", type=Path, default=Path("runs/coverage"))
    parser.add_argument("--out", type=Path, default=Path("results"))
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    names = [name for name in ARCHITECTURES if options.only in name]
    if options.only:
        for name in names:
            if options.side != "peer":
                print(json.dumps(asdict(judge(name, options.limit)), indent=1))
            if options.side != "bmrs":
                print(json.dumps(asdict(peer.judge_within(name, options.peer_limit)), indent=1))
        return
    ours, theirs = {}, {}
    if options.side != "bmrs":
        theirs = collect(options.kept / "peer.jsonl", names, lambda name: peer.judge_within(name, options.peer_limit))
    if options.side != "peer":
        ours = collect(options.kept / "bmrs.jsonl", names, lambda name: judge(name, options.limit))
    if options.side != "both":
        return
    made = provenance(
        fraction=FRACTION, seeds=1, device="cpu", limit=options.limit, peer_limit=options.peer_limit,
        threads=torch.get_num_threads(), libraries=_versions(),
    )  # fmt: skip
    options.out.mkdir(parents=True, exist_ok=True)
    content = {"bmrs": ours, "torch_pruning": theirs, "summary": summary(ours, theirs), "provenance": made}
    (options.out / "coverage.json").write_text(json.dumps(content, indent=1) + "\n")
    page = markdown(ours, theirs, made)
    (options.out / "coverage.md").write_text(page)
    print(page)


def _versions() -> dict[str, str]:
    from importlib.metadata import version

    return {name: version(name) for name in ("torchvision", "timm", "transformers", "torch-pruning")}


def summary(ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, Any]:
    rows = list(ours.values())
    found = sum(row["found"] for row in rows)
    return {
        "architectures": len(rows),
        "bmrs": dict(Counter(row["verdict"] for row in rows)),
        "torch_pruning": dict(Counter(row["verdict"] for row in theirs.values())),
        "with_a_structure": sum(row["removable"] > 0 for row in rows) / len(rows),
        "structures": found,
        "removable": sum(row["removable"] for row in rows) / max(1, found),
        "discover_seconds_mean": statistics.mean(row["discover_seconds"] for row in rows),
        "verify_seconds_mean": statistics.mean(row["verify_seconds"] for row in rows),
        "worst_error": max(row["error"] or 0.0 for row in rows),
    }


def markdown(ours: dict[str, Any], theirs: dict[str, Any], made: dict[str, Any]) -> str:
    total = summary(ours, theirs)
    lines = [
        f"# Coverage: {total['architectures']} architectures, 40 % of every structure removed",
        "",
        "| | exact | wrong | crash | hang | nothing removed |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for title, key in (("bmrs", "bmrs"), ("Torch-Pruning", "torch_pruning")):
        counts = [str(total[key].get(verdict, 0)) for verdict in ("exact", "wrong", "crash", "hang", "nothing")]
        lines.append(f"| {title} | {' | '.join(counts)} |")
    lines += [
        "",
        f"At least one removable structure in {total['with_a_structure']:.1%} of the architectures; "
        f"{total['removable']:.1%} of the {total['structures']:,} structures found are removable in the model's own "
        f"code; "
        f"discovery takes {total['discover_seconds_mean']:.1f} s on average, the proof "
        f"{total['verify_seconds_mean']:.1f} s; largest relative error {total['worst_error']:.0e}.",
        "",
        "Exact: within 1e-8 of the same network with the removed units silenced, in float64 (1e-3 for the few that "
        "compute in float32 only; Torch-Pruning is allowed 1e-6). Share: of the parameters, that lie in "
        "structures found.",
        "",
        "| architecture | structures | removable | share | discover, s | proof, s | error | bmrs | Torch-Pruning |",
        "|---|---:|---:|---:|---:|---:|---:|---|---|",
    ]
    for name, row in ours.items():
        error = "" if row["error"] is None else f"{row['error']:.0e}"
        other = theirs.get(name, {}).get("verdict", "")
        lines.append(
            f"| {name} | {row['found']} | {row['removable']} | {row['share']:.0%} | {row['discover_seconds']:.1f} | "
            f"{row['verify_seconds']:.1f} | {error} | {row['verdict']} | {other} |"
        )
    versions = {**made["versions"], **made["libraries"]}
    return "\n".join(
        [
            *lines,
            "",
            f"`{made['command']}`, {made['machine']}, {made['threads']} thread(s), {made['date']},",
            f"commit {made['commit']},",
            ", ".join(f"{name} {version}" for name, version in versions.items()) + ".",
            "",
        ]
    )


if __name__ == "__main__":
    main()
