"""The demo over several seeds: what a newcomer may expect of it.

python benchmarks/demo.py              # writes results/demo.json and results/demo.md
"""

import argparse
import json
import statistics
from dataclasses import asdict
from pathlib import Path

from bmrs.study.demo import Demo
from bmrs.study.provenance import provenance
from bmrs.study.training import Recipe


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--network", default="lenet5")
    parser.add_argument("--out", type=Path, default=Path("results"))
    options = parser.parse_args()
    runs = []
    for seed in range(options.seeds):
        outcome = Demo("digits", options.network, "bmrs_n", Recipe(seed=seed)).run()
        runs.append(
            {
                "seed": seed,
                "before": asdict(outcome.before),
                "after": asdict(outcome.after),
                "pruning_epoch_seconds": outcome.pruning_seconds,
            }
        )
        print(runs[-1], flush=True)
    made = provenance(seeds=options.seeds, device="cpu", recipe=asdict(Recipe()))
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "demo.json").write_text(json.dumps({"runs": runs, "provenance": made}, indent=2) + "\n")
    page = markdown(runs, made, options.network)
    (options.out / "demo.md").write_text(page)
    print(page)


def markdown(runs: list[dict], made: dict, network: str) -> str:
    def spread(values: list[float], scale: float = 1.0, digits: int = 1) -> str:
        values = [scale * value for value in values]
        return f"{statistics.mean(values):,.{digits}f} ± {statistics.stdev(values):,.{digits}f}"

    def column(which: str, what: str) -> list[float]:
        return [run[which][what] for run in runs]

    before, after = (spread(column(which, "accuracy"), 100) for which in ("before", "after"))
    rows = [f"| test accuracy, % | {before} | {after} |"]
    for what, title in (("parameters", "parameters"), ("multiply_adds", "multiply-adds per image")):
        removed = [1 - run["after"][what] / run["before"][what] for run in runs]
        rows.append(
            f"| {title} | {runs[0]['before'][what]:,} | {spread(column('after', what), digits=0)} "
            f"({spread(removed, 100)} % removed) |"
        )
    faster = [run["before"]["epoch_seconds"] / run["after"]["epoch_seconds"] for run in runs]
    shrinking = [run["pruning_epoch_seconds"][0] / run["pruning_epoch_seconds"][1] for run in runs]
    return "\n".join(
        [
            f"# The demo: {network} on digits, {len(runs)} seeds, mean ± standard deviation",
            "",
            "| | whole network | pruned by BMRS_N |",
            "|---|---:|---:|",
            *rows,
            "",
            f"An epoch of training the small network is {spread(faster)} times faster than one of the whole network;",
            f"an epoch with gates got {spread(shrinking)} times faster as the network shrank, first ones to last.",
            "",
            f"`{made['command']}`, {made['machine']}, {made['date']}, commit {made['commit']},",
            f"versions {made['versions']}.",
            "",
        ]
    )


if __name__ == "__main__":
    main()
