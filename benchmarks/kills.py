"""Kill a training that prunes, at random moments, and see whether it ends as if nothing had happened.

python -m benchmarks.kills                   # 20 kills of examples/plain_loop.py; writes results/kills.json and .md
"""

import argparse
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from safetensors import safe_open

from bmrs.study.provenance import provenance

EXAMPLE = Path(__file__).parent.parent / "examples" / "plain_loop.py"


def start(folder: Path, epochs: int) -> subprocess.Popen:
    command = [sys.executable, str(EXAMPLE), "--epochs", str(epochs), "--out", str(folder)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finished(folder: Path, epochs: int) -> float:
    """Runs to the end; returns the seconds from the end of the first epoch on."""
    said: list[str] = []
    begun = time.perf_counter()
    with start(folder, epochs) as process:
        for line in process.stdout:
            if not any(other.startswith("epoch ") for other in said):
                begun = time.perf_counter()
            said.append(line)
    if process.returncode:
        raise RuntimeError(f"the training failed:\n{''.join(said)}")
    return time.perf_counter() - begun


def killed(folder: Path, epochs: int, epoch: int, share: float, seconds: float) -> bool:
    """Kills it in an epoch, at a share of the seconds one takes; returns whether it was still training."""
    with start(folder, epochs) as process:
        for line in process.stdout if epoch else ():
            if line.startswith(f"epoch {epoch}:"):
                break
        time.sleep(share * seconds)
        training = process.poll() is None and not (folder / "small.safetensors").exists()
        process.kill()
    return training


def outcome(folder: Path) -> tuple[str, dict[str, torch.Tensor]]:
    """What was removed, and the weights."""
    with safe_open(folder / "small.safetensors", framework="pt") as file:
        return file.metadata()["bmrs"], {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def run(kills: int, epochs: int, seed: int) -> dict:
    chance = random.Random(seed)
    runs = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        whole = finished(folder / "undisturbed", epochs)
        removed, weights = outcome(folder / "undisturbed")
        while len(runs) < kills:
            own = folder / str(len(runs))
            epoch, share = chance.randrange(epochs), chance.random()
            training = killed(own, epochs, epoch, share, whole / (epochs - 1))
            if not training:  # too late: another moment
                shutil.rmtree(own)
                continue
            finished(own, epochs)
            again, there = outcome(own)
            runs.append(
                {
                    "killed_after_epochs": epoch + share,
                    "same_structure": again == removed,
                    "same_weights": all(torch.equal(there[name], weight) for name, weight in weights.items()),
                }
            )
            print(runs[-1], flush=True)
    return {"training_seconds": whole, "epochs": epochs, "runs": runs}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--out", type=Path, default=Path("results"))
    options = parser.parse_args()
    result = run(options.kills, options.epochs, options.seed)
    result["provenance"] = made = provenance(seeds=1, device="cpu")
    runs = result["runs"]
    structure, weights = (sum(one[key] for one in runs) for key in ("same_structure", "same_weights"))
    page = [
        f"# {len(runs)} kills of a training that prunes",
        "",
        f"`examples/plain_loop.py`, {options.epochs} epochs, killed (SIGKILL) at random moments and started again,",
        "which resumes from its last checkpoint, against the same training undisturbed.",
        "",
        f"- the same final structure: **{structure} of {len(runs)}**",
        f"- the same weights, bit for bit: **{weights} of {len(runs)}**",
        f"- killed after so many epochs: {', '.join(format(one['killed_after_epochs'], '.1f') for one in runs)}",
        "",
        f"`{made['command']}`, {made['machine']}, {made['date']}, commit {made['commit']},",
        f"versions {made['versions']}.",
        "",
    ]
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "kills.json").write_text(json.dumps(result, indent=2) + "\n")
    (options.out / "kills.md").write_text("\n".join(page))
    print("\n".join(page))


if __name__ == "__main__":
    main()
