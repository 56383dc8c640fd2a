"""What pruning an 8-billion-parameter decoder on 8 and on 64 GPUs would take, on paper, from measured constants.

    python -m benchmarks.scale        # writes results/scale.json, results/scale.md and the tables of docs/scale.md

Measured here: listing Llama-3-8B and Qwen3-8B on the meta device, the proof on two narrow layers of each, and on one
core the cost of a unit. The GPU's cost of a unit is read from results/scores_cuda.json. The rest is arithmetic
(benchmarks/sizing.py).
"""

import argparse
import json
import math
import random
import re
import resource
import statistics
import subprocess
import sys
import time
import weakref
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

import benchmarks.architectures  # noqa: F401  makes transformers importable beside a torchvision without its kernels
import bmrs
from benchmarks import scale_tables, sizing
from benchmarks.sizing import Constants, Decoder, Machine, Run
from bmrs.structure.plan import record
from bmrs.study.provenance import provenance

# As published with the weights: meta-llama/Meta-Llama-3-8B and Qwen/Qwen3-8B, config.json.
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "Llama-3-8B": {
        "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}, "tie_word_embeddings": False,
    },
    "Qwen3-8B": {
        "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6, "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        "tie_word_embeddings": False,
    },
}  # fmt: skip
NARROW = {"num_hidden_layers": 2, "hidden_size": 256, "vocab_size": 512, "head_dim": 8}
"""Where numbers are affordable: two layers, all heads and groups, an intermediate size in proportion."""
ROOT = Path(__file__).parent.parent
UNITS, ROWS = 100_000, 2  # what the cost of a draw is measured on
LEFT = 0.5  # of the removable parameters, for the sizes of files


def narrow(name: str) -> dict[str, Any]:
    return {**NARROW, "intermediate_size": CONFIGURATIONS[name]["intermediate_size"] // 16}


def build(name: str, device: str = "meta", **changes: Any) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """A network of this family, and inputs for it."""
    import transformers

    family = "Llama" if name.startswith("Llama") else "Qwen3"
    config = getattr(transformers, f"{family}Config")(**{**CONFIGURATIONS[name], **changes})
    with torch.device(device):
        model = getattr(transformers, f"{family}ForCausalLM")(config)
        return model, {"input_ids": torch.randint(config.vocab_size, (2, 16))}


def decoder(name: str, **changes: Any) -> Decoder:
    c = {**CONFIGURATIONS[name], **changes}
    heads = c["num_attention_heads"]
    return Decoder(
        c["num_hidden_layers"], c["hidden_size"], c["intermediate_size"], heads, c["num_key_value_heads"],
        c.get("head_dim", c["hidden_size"] // heads), c["vocab_size"], head_norms=name.startswith("Qwen3"),
    )  # fmt: skip


def patterns(structures: bmrs.Structures) -> set[Any]:
    """What the structures are, whichever layer they are in: their kind, the dimensions they occupy, where they are
    gated.
    """

    def anywhere(places: Any) -> frozenset[tuple[str, int]]:
        return frozenset((re.sub(r"\.\d+\.", ".*.", name), dim) for name, dim in places)

    return {(s.kind, anywhere(s.places), anywhere(s.consumers)) for s in structures}


def agrees(structures: bmrs.Structures, expected: Decoder) -> bool:
    """Every layer has its groups and its neurons, of the right number and size, and nothing else is listed."""
    kinds = {kind: [s for s in structures if s.kind == kind] for kind in ("group", "neuron")}
    return (
        structures.parameters == expected.parameters
        and len(structures) == 2 * expected.layers
        and [(s.units, s.params_per_unit) for s in kinds["group"]]
        == [(expected.groups, expected.per_group)] * expected.layers
        and [(s.units, s.params_per_unit) for s in kinds["neuron"]]
        == [(expected.intermediate, expected.per_neuron)] * expected.layers
    )


# --- measured ---------------------------------------------------------------------------------------------------------


def discover(name: str) -> dict[str, Any]:
    """List a network of full size on the meta device, and write down a removal of half of its units."""
    torch.set_num_threads(1)
    model, inputs = build(name)
    wall, cpu = time.perf_counter(), time.process_time()
    structures = bmrs.structures(model, inputs)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    small = bmrs.structures(*build(name, **narrow(name)))
    units = sum(s.units for s in structures)
    draws = random.Random(0)
    gone = {v for s in structures for v in draws.sample(s.variables, s.units // 2)}
    start = time.process_time()
    content = record(structures, gone, set()).to_json()
    taken = time.process_time() - start
    return {
        "parameters": structures.parameters,
        "structures": len(structures),
        "units": units,
        "share": structures.share,
        "as_computed": agrees(structures, decoder(name)),
        "as_in_two_narrow_layers": patterns(structures) == patterns(small),
        "seconds": wall,
        "cpu_seconds": cpu,
        "memory": memory,
        "record_bytes": len(json.dumps(content)),
        "record_seconds": taken,
    }


def prove(name: str) -> dict[str, Any]:
    """The proof with numbers, on two narrow layers of the same code."""
    torch.manual_seed(0)
    structures = bmrs.structures(*build(name, "cpu", **narrow(name)))
    structures.verify()
    return {
        "structures": len(structures),
        "exact": sum(s.status == "exact" for s in structures),
        "as_computed": agrees(structures, decoder(name, **narrow(name))),
    }


def seconds(work: Callable[[], Any], repeats: int) -> float:
    """Median processor time, which neighbours on the machine disturb less than the clock."""
    work()
    times = []
    for _ in range(repeats):
        start = time.process_time()
        work()
        times.append(time.process_time() - start)
    return statistics.median(times)


class Allocated(TorchDispatchMode):
    """Bytes of the tensors that operations make, and the most there were at once."""

    now = most = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        known = {leaf.untyped_storage()._cdata for leaf in _pytree.tree_leaves((args, kwargs)) if _is_tensor(leaf)}
        for leaf in filter(_is_tensor, _pytree.tree_leaves(result)):
            storage = leaf.untyped_storage()
            if storage._cdata not in known:  # neither a view nor made in place
                self.now += storage.nbytes()
                self.most = max(self.most, self.now)
                weakref.finalize(storage, self._freed, storage.nbytes())
        return result

    def _freed(self, size: int) -> None:
        self.now -= size


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def per_unit(repeats: int) -> dict[str, float]:
    """On one core: seconds and bytes of one unit, or of one unit in one row of a draw."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    mu = torch.empty(UNITS).uniform_(-10, 0, generator=generator).requires_grad_()
    log_sigma = torch.empty(UNITS).uniform_(-5, 3, generator=generator).requires_grad_()

    def posterior() -> bmrs.TruncatedLogNormal:
        return bmrs.TruncatedLogNormal(mu, log_sigma, validate=False)

    bank, slope = bmrs.NoiseBank({"layer": UNITS}, seed=0), torch.ones(ROWS, UNITS)
    bank.mu.data, bank.log_sigma.data = mu.data, log_sigma.data

    def draw() -> None:
        bank.draw(ROWS).backward(slope)

    with Allocated() as allocated:
        draw()
    return {
        "draw": seconds(draw, repeats) / (UNITS * ROWS),
        "draw_peak": allocated.most / (UNITS * ROWS),
        "kl": seconds(lambda: bmrs.draws.kl_gradient(bank.mu, bank.log_sigma, slope[0]), repeats) / UNITS,
        "scores": seconds(lambda: bmrs.evidence.scores(posterior()), repeats) / UNITS,
    }


def on_a_gpu(gpu: dict[float, float], units: int, machine: Machine) -> dict[str, float]:
    """Seconds per unit there: of scores what a call for as many units took; of kernels what their bytes take. A draw
    writes θ and two derivatives and reads the derivatives and θ's gradient, once more split and put together; the
    KL's gradient is made of φ and the prices, and added to φ's.
    """

    def scores(count: int) -> float:
        """Between the sizes measured, along a straight line of logarithms."""
        sizes = sorted(gpu)
        count = min(max(count, sizes[0]), sizes[-1])
        above = next(size for size in sizes if size >= count)
        below = max((size for size in sizes if size < count), default=above)
        part = 0.0 if above == below else math.log(count / below) / math.log(above / below)
        return gpu[below] ** (1 - part) * gpu[above] ** part

    return {"draw": 32 / machine.bandwidth, "kl": 44 / machine.bandwidth, "scores": scores(units)}


# --- computed ---------------------------------------------------------------------------------------------------------


def plan(name: str, found: dict[str, Any], core: dict[str, float], gpu: dict[float, float]) -> dict[str, Any]:
    """Everything sizing.py says of a network, for 8 and for 64 GPUs and both kinds of noise."""
    network, machine, runs = decoder(name), Machine(), []
    for gpus in (8, 64):
        for per_example in (True, False):
            run = Run(gpus, per_example=per_example)
            constants = Constants(
                **on_a_gpu(gpu, network.units, machine),
                draw_peak=core["draw_peak"],
                record=found["record_bytes"] / found["units"], indices=found["record_seconds"] / found["units"],
            )  # fmt: skip
            runs.append(
                {
                    **asdict(run),
                    "memory": sizing.memory(network, run, constants),
                    "step": sizing.step(network, run, constants, machine),
                    "prune": sizing.prune(network, run, constants, machine),
                    "traffic": 12 * network.parameters * (gpus - 1) / gpus,
                    "traffic_of_cut": sizing.traffic_of_cut(network, gpus),
                }
            )
    return {
        "runs": runs,
        "prune_memory": sizing.prune_memory(network),
        "checkpoints": sizing.checkpoints(network, constants, LEFT),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--discover", choices=CONFIGURATIONS, help="list this network alone, and print what was found")
    options = parser.parse_args()
    if options.discover:
        print(json.dumps(discover(options.discover)))
        return
    measured = json.loads((ROOT / "results" / "scores_cuda.json").read_text())
    gpu = {float(units): one for units, one in measured["library_seconds_per_unit"].items()}
    listed, proved = {}, {}
    for name in CONFIGURATIONS:  # each in a process of its own, for its memory and an undisturbed clock
        command = [sys.executable, "-m", "benchmarks.scale", "--discover", name]
        listed[name] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        proved[name] = prove(name)
        print(f"{name}: listed in {listed[name]['seconds']:.0f} s", flush=True)
    core = per_unit(options.repeats)
    content = {
        "listed": listed,
        "proved": proved,
        "core": core,
        "gpu": {"scores": gpu, "machine": measured["provenance"]["machine"]},
        "machine": asdict(Machine()),
        "plans": {name: plan(name, listed[name], core, gpu) for name in CONFIGURATIONS},
        "provenance": provenance(seeds=1, device="cpu, one thread", repeats=options.repeats),
    }
    (ROOT / "results" / "scale.json").write_text(json.dumps(content, indent=1) + "\n")
    scale_tables.write(ROOT)


if __name__ == "__main__":
    main()
