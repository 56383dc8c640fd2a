"""Training with fused gates and with plain torch's: the same study twice, and whether its results differ.

    python -m benchmarks.fused --data-dir DATA                # writes results/fused.json and results/fused.md

Runs `bmrs study table1` for one setting with BMRS_FUSED=1 and with BMRS_FUSED=0, side by side where there are two
cores. Draws differ by rounding alone, which training turns into other networks after some epochs: what must agree is
the mean over seeds.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from bmrs.study.provenance import provenance

NAMES = {"1": "fused", "0": "plain torch"}
MEASURES = ("accuracy", "published", "actual")


def start(options: argparse.Namespace, fused: str) -> subprocess.Popen[bytes]:
    command = [
        sys.executable, "-m", "bmrs", "study", "table1", "--settings", options.setting, "--methods", options.method,
        "--seeds", str(options.seeds), "--device", options.device, "--out", str(options.work / f"fused{fused}"),
    ]  # fmt: skip
    command += ["--data-dir", str(options.data_dir)] if options.data_dir else []
    threads = {"OMP_NUM_THREADS": "1"} if options.device == "cpu" else {}
    return subprocess.Popen(command, env={**os.environ, **threads, "BMRS_FUSED": fused})


def of(path: Path) -> dict[str, Any]:
    content = json.loads((path / "table1.json").read_text())
    runs = sorted(content["runs"], key=lambda run: run["seed"])
    values = {"accuracy": [run["accuracy"] for run in runs]}
    values |= {name: [run["compression"][name] for run in runs] for name in ("published", "actual")}
    return {"values": values, "seconds": sum(one["seconds"] for one in content["settings"].values())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--setting", default="mlp-fashion-mnist")
    parser.add_argument("--method", default="bmrs_n")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--work", type=Path, default=Path("runs/fused"), help="where the two studies go on from")
    parser.add_argument("--out", type=Path, default=Path("results/fused"))
    options = parser.parse_args()
    running = [start(options, fused) for fused in NAMES]
    if any(process.wait() for process in running):
        raise SystemExit("fused: a study failed, see above; the same command goes on.")
    found = {NAMES[fused]: of(options.work / f"fused{fused}") for fused in NAMES}
    made = provenance(device=options.device, seeds=options.seeds, setting=options.setting, method=options.method)
    content = {"studies": found, "provenance": made}
    options.out.with_suffix(".json").write_text(json.dumps(content, indent=1) + "\n")
    options.out.with_suffix(".md").write_text(markdown(content))
    print(markdown(content))


def markdown(content: dict[str, Any]) -> str:
    made, studies = content["provenance"], content["studies"]
    lines = [
        "# Fused gates and plain torch's",
        "",
        f"{made['setting']}, {made['method']}, {made['seeds']} seeds, {made['device']}.",
        "",
        "| | test accuracy | compression, published counting | actual | minutes, side by side |",
        "|---|---:|---:|---:|---:|",
    ]
    for name, one in studies.items():
        cells = (f"{100 * statistics.mean(v):.2f} ± {100 * statistics.stdev(v):.2f} %" for v in one["values"].values())
        lines.append(f"| {name} | {' | '.join(cells)} | {one['seconds'] / 60:.0f} |")
    first, second = (one["values"] for one in studies.values())
    cells = []
    for name in MEASURES:
        error = math.sqrt(sum(statistics.variance(own) / len(own) for own in (first[name], second[name])))
        miss = statistics.mean(first[name]) - statistics.mean(second[name])
        cells.append(f"{100 * miss:+.2f} ± {100 * error:.2f}")
    return "\n".join(
        [
            *lines,
            f"| difference of the means, and its standard error | {' | '.join(cells)} | |",
            "",
            f"`{made['command']}`, {made['machine']}, {made['date']},",
            f"commit {made['commit']}, torch {made['versions']['torch']}.",
            "",
        ]
    )


if __name__ == "__main__":
    main()
