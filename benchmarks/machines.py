"""A study on three machines, which are processes of this one, of which one is killed: the same table as without.

python -m benchmarks.machines                # writes results/machines.json and .md
"""

import argparse
import json
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from ray.cluster_utils import Cluster
from rich.console import Console

from bmrs.study.commands import write
from bmrs.study.computing import compute
from bmrs.study.engine import Engine, Local
from bmrs.study.engine_ray import Ray
from bmrs.study.jobs import JOBS, Plan, settle
from bmrs.study.provenance import provenance
from bmrs.study.screen import Screen
from bmrs.study.settings import METHODS

MACHINES = 3


def plan(out: Path, seeds: int, epochs: int) -> Plan:
    """Table 1 on the embedded digits, every method, a task for each seed; fast enough for units to go."""
    made = settle(JOBS["table1"], settings="mlp-digits", seeds=seeds, epochs=epochs, fine_tune=2, seeds_per_task=1,
                  device="cpu", out=out)  # fmt: skip
    return replace(made, settings=(replace(made.settings[0], learning_rate=3e-2),))


class Killing(Screen):
    """Kills the machine of the first task that has half of its epochs done."""

    def __init__(self, cluster: Cluster, engine: Ray) -> None:
        super().__init__(Console(quiet=True), ["mlp-digits"])
        self.cluster, self.engine, self.killed, self.notes = cluster, engine, "", []

    def progress(self, key: str, done: int, total: int, task: str = "") -> None:
        super().progress(key, done, total, task)
        nodes = [n for n in self.cluster.worker_nodes if n.node_id == self.engine.running[task].node]
        if 2 * done >= total and nodes and not self.killed:
            self.killed = f"{task}, {done} of {total} epochs done"
            self.cluster.remove_node(nodes[0], allow_graceful=False)

    def note(self, about: str, line: str) -> None:
        self.notes.append(f"{about}: {line}")


def computed(made: Plan, engine: Engine, screen: Screen | None = None) -> dict[str, Any]:
    """The runs, the table as it is printed, and how long it took."""
    begun = time.perf_counter()
    content = compute(made, screen or Screen(Console(quiet=True), ["mlp-digits"]), engine, print)
    seconds = time.perf_counter() - begun
    write(made, content)
    # Below the table stand the day and the time it took.
    table = [line for line in (made.out / "table1.md").read_text().splitlines() if line.startswith("|")]
    return {"runs": content["runs"], "table": table, "seconds": seconds}


def run(seeds: int, epochs: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        alone = computed(plan(folder / "alone", seeds, epochs), Local())
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
        try:
            for _ in range(MACHINES - 1):
                cluster.add_node(num_cpus=1)
            with Ray(cluster.address) as engine:
                engine.device("cpu")
                whole = computed(plan(folder / "whole", seeds, epochs), engine)
                screen = Killing(cluster, engine)
                killed = computed(plan(folder / "killed", seeds, epochs), engine, screen)
        finally:
            cluster.shutdown()
    others = {"three machines": whole, "three machines, one killed": killed}
    return {
        "networks": len(alone["runs"]), "tasks": seeds, "epochs": epochs, "table": alone["table"],
        "removed": [run["compression"]["actual"] for run in alone["runs"]],
        "killed": screen.killed, "said": screen.notes, "seconds": {"this process": alone["seconds"]} | {
            name: one["seconds"] for name, one in others.items()},
        "same_table": {name: one["table"] == alone["table"] for name, one in others.items()},
        "same_numbers": {name: one["runs"] == alone["runs"] for name, one in others.items()},
    }  # fmt: skip


def page(result: dict[str, Any]) -> str:
    made = result["provenance"]
    lines = [
        f"# A study on {MACHINES} machines of which one is killed",
        "",
        f"Table 1 on the embedded digits, {result['networks']} networks of {result['epochs']} epochs in",
        f"{result['tasks']} tasks, by this process and by a Ray cluster of {MACHINES} nodes of one core, which are",
        f"processes of one machine. A node was killed (SIGKILL) while it computed {result['killed']}.",
        "",
        "| compared with this process | the same table | the same numbers, every network |",
        "|---|---|---|",
        *(f"| {name} | {_yes(result['same_table'][name])} | {_yes(result['same_numbers'][name])} |"
          for name in result["same_table"]),
        "",
        "What the screen said of it:",
        "",
        *(f"    {line}" for line in result["said"]),
        "",
        "The table in the published counting, alike for all:",
        "",
        *result["table"][: len(METHODS) * 2 + 2],
        "",
        f"`{made['command']}`, {made['machine']}, {made['date']}, commit {made['commit']},",
        f"versions {made['versions']}.",
        "",
    ]  # fmt: skip
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--out", type=Path, default=Path("results"))
    options = parser.parse_args()
    result = run(options.seeds, options.epochs)
    result["provenance"] = provenance(seeds=options.seeds, device="cpu")
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "machines.json").write_text(json.dumps(result, indent=2) + "\n")
    (options.out / "machines.md").write_text(page(result))
    print(page(result))


def _yes(value: bool) -> str:
    return "yes" if value else "**no**"


if __name__ == "__main__":
    main()
