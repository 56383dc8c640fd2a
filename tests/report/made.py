"""Results as a study writes them, made up: the published numbers with noise, curves that hold and then fall."""

import math
import random
from typing import Any

from bmrs.study import published

METHODS = ("none", "l2", "mean", "snr", "bmrs_n", "bmrs_u8", "bmrs_u4")
LAYERS = {
    "mlp-mnist": {f"fc{i}": 100 for i in range(1, 9)},
    "mlp-fashion-mnist": {"fc1": 150, "fc2": 150},
    "mlp-cifar10": {f"fc{i}": 150 for i in range(1, 7)},
    "lenet5-mnist": {"conv1": 6, "conv2": 16, "fc1": 120, "fc2": 84},
    "lenet5-fashion-mnist": {"conv1": 6, "conv2": 16, "fc1": 120, "fc2": 84},
    "lenet5-cifar10": {"conv1": 18, "conv2": 48, "fc1": 360, "fc2": 252},
}
SIZES = {
    "mlp-mnist": (174_210, 173_400), "mlp-fashion-mnist": (177_910, 177_600), "mlp-cifar10": (576_010, 575_100),
    "lenet5-mnist": (61_706, 416_520), "lenet5-fashion-mnist": (61_706, 416_520),
    "lenet5-cifar10": (548_350, 3_748_680),
}  # fmt: skip

# The results of one post-training study share its energy.
ENERGY = {"continuous": 0.0831, "post-training": 0.214, "correlations": 0.214, "posteriors": 0.214, "timing": 0.0021}


def _of(setting: str) -> tuple[str, str]:
    network, _, data = setting.partition("-")
    return network, data


def result(kind: str, runs: list[dict[str, Any]], settings: tuple[str, ...] = tuple(LAYERS)) -> dict[str, Any]:
    """A result file's content around these runs."""
    return {
        "kind": kind,
        "provenance": {
            "command": f"bmrs study {kind} --seeds 10", "date": "2025-11-02T14:05:11+00:00", "machine": "NVIDIA H200",
            "versions": {"bmrs": "0.3.0", "python": "3.11.2", "torch": "2.11.0"}, "commit": "66714f6a", "seeds": 10,
            "device": "cuda",
        },
        "settings": {
            key: {
                "network": _of(key)[0], "data": _of(key)[1], "layers": LAYERS[key], "batch": 128,
                "learning_rate": 8.5e-4, "epochs": 50, "fine_tune": 10, "parameters": SIZES[key][0],
                "multiply_adds": SIZES[key][1], "seconds": 71.4, "networks": 70,
            }
            for key in settings
        },
        "runs": runs,
        "energy": {"kwh": ENERGY[kind], "co2_g": 444 * ENERGY[kind], "how": "measured",
                   "note": "Energy counter of the GPU alone; CO₂ at 444 g/kWh, the world's average of 2024."},
    }  # fmt: skip


def _pruned_run(chance: random.Random, setting: str, method: str, seed: int, price: str, strength: float,
                gone: float, accuracy: float) -> dict[str, Any]:  # fmt: skip
    parameters, work = SIZES[setting]
    actual = min(0.995, gone * 1.03 + 0.02) if gone else 0.0
    share = (1 - actual) ** 0.6
    layers = LAYERS[setting]
    units = {n: max(1, min(u, round(u * share * chance.uniform(0.7, 1.3)))) if gone else u for n, u in layers.items()}
    total, left = sum(layers.values()), sum(units.values())
    curve = [total - (total - left) / (1 + math.exp(-(e - 18) / 4)) if gone else total for e in range(1, 51)]
    return {
        "setting": setting, "method": method, "price": price, "strength": strength, "seed": seed,
        "accuracy": accuracy, "validation": accuracy + chance.gauss(0.002, 0.001),
        "compression": {"published": gone, "actual": actual}, "parameters": round(parameters * (1 - actual)),
        "multiply_adds": round(work * (1 - actual) ** 0.8), "units": units, "emptied": [],
        "history": [{"epoch": e, "units": round(c), "published": 0.5} for e, c in enumerate(curve, 1)],
    }  # fmt: skip


def table1(seeds: int = 10, settings: tuple[str, ...] = tuple(LAYERS)) -> dict[str, Any]:
    chance, runs = random.Random(1), []
    for setting in settings:
        for method in METHODS:
            paper = published.result(*_of(setting), method)
            assert paper is not None
            for seed in range(seeds):
                gone = min(0.998, max(0.0, chance.gauss(paper.compression.mean, paper.compression.sd) / 100))
                accuracy = min(0.995, chance.gauss(paper.accuracy.mean, paper.accuracy.sd + 0.1) / 100)
                runs.append(_pruned_run(chance, setting, method, seed, "layer", 1.0, gone, accuracy))
    return result("continuous", runs, settings)


def prices(seeds: int = 4) -> dict[str, Any]:
    chance, runs = random.Random(2), []
    for setting, whole in (("lenet5-mnist", 0.991), ("lenet5-fashion-mnist", 0.894), ("mlp-fashion-mnist", 0.885)):
        for price, strength, gone, lost in (
            ("layer", 1.0, 0.88, 0.05), ("uniform", 1.0, 0.92, 0.015), ("uniform", 0.5, 0.86, 0.003),
            ("params", 0.5, 0.92, 0.012), ("params", 0.25, 0.88, 0.002), ("elbo", 1.0, 0.35, 0.0),
        ):  # fmt: skip
            for seed in range(seeds):
                runs.append(
                    _pruned_run(chance, setting, "bmrs_n", seed, price, strength, chance.gauss(gone, 0.006),
                                chance.gauss(whole - lost, 0.003))
                )  # fmt: skip
    return result("continuous", runs, ("lenet5-mnist", "lenet5-fashion-mnist", "mlp-fashion-mnist"))


def figure4(seeds: int = 10) -> dict[str, Any]:
    chance, runs = random.Random(3), []
    for p1 in (2, 4, 6, 8, 10, 12):
        for seed in range(seeds):
            gone = chance.gauss(0.70 - 0.009 * p1, 0.01)
            runs.append(_pruned_run(chance, "lenet5-cifar10", f"bmrs_u{p1}", seed, "layer", 1.0, gone,
                                    chance.gauss(0.65 + 0.0012 * p1, 0.006)))  # fmt: skip
    return result("continuous", runs, ("lenet5-cifar10",))


def figure2(seeds: int = 10, fractions: int = 100, settings: tuple[str, ...] = tuple(LAYERS)) -> dict[str, Any]:
    chance, runs = random.Random(4), []
    steps = [round((i + 1) / (fractions + 1), 4) for i in range(fractions)]
    for setting in settings:
        paper = published.result(*_of(setting), "none")
        assert paper is not None
        for method in (*METHODS[1:], "gradient"):
            hold = {"l2": 0.55, "gradient": 0.5, "mean": 0.82, "snr": 0.86, "bmrs_n": 0.85}.get(method, 0.83)
            for seed in range(seeds):
                whole = chance.gauss(paper.accuracy.mean, 0.2) / 100
                at = hold + chance.gauss(0, 0.015)
                accuracy = [0.1 + (whole - 0.1) / (1 + math.exp((f - at - 0.08) / 0.025)) - 0.02 * f**3
                            + chance.gauss(0, 0.002) for f in steps]  # fmt: skip
                counted = [min(0.999, 1 - (1 - f) ** 1.3) for f in steps]
                physical = [min(0.999, 1 - (1 - f) ** 1.6) for f in steps]
                stop = min(range(fractions), key=lambda i: abs(steps[i] - at))
                runs.append({
                    "setting": setting, "method": method, "seed": seed, "fractions": steps,
                    "compression": {"published": counted, "actual": physical}, "accuracy": accuracy, "whole": whole,
                    "boundary": None if method in ("l2", "gradient") else {
                        "fraction": steps[stop], "published": counted[stop], "actual": physical[stop],
                        "accuracy": accuracy[stop]},
                })  # fmt: skip
    return result("post-training", runs, settings)


def figure3(seeds: int = 10) -> dict[str, Any]:
    chance, runs, names = random.Random(5), [], list(METHODS[1:])
    for setting in LAYERS:
        for seed in range(seeds):
            table = [[1.0] * 6 for _ in names]
            for i in range(6):
                for j in range(i):
                    table[i][j] = table[j][i] = chance.gauss(0.3 if j == 0 else 0.97 - 0.05 * (i - j), 0.03)
            runs.append({"setting": setting, "seed": seed, "methods": names, "spearman": table})
    return result("correlations", runs)


def figure1(seeds: int = 3) -> dict[str, Any]:
    chance, runs = random.Random(6), []
    for setting, layers in LAYERS.items():
        for seed in range(seeds):
            names = [name for name, units in layers.items() for _ in range(units)]
            alive = [chance.random() < 0.2 for _ in names]
            mean = [chance.betavariate(8, 4) if a else chance.gauss(0.064, 0.004) for a in alive]
            gone = [-math.exp(chance.gauss(6.3, 0.8)) if a else -chance.uniform(0.3, 0.95) for a in alive]
            by_range = [d * 0.8 if a else chance.uniform(0.1, 0.6) for a, d in zip(alive, gone, strict=True)]
            runs.append({
                "setting": setting, "seed": seed, "layer": names, "mean": mean, "mu": mean, "log_sigma": mean,
                "snr": mean, "delta_f": {"bmrs_n": gone, "bmrs_u8": by_range, "bmrs_u4": by_range},
            })  # fmt: skip
    return result("posteriors", runs)


def timing() -> dict[str, Any]:
    chance, runs = random.Random(7), []
    for setting in LAYERS:
        for mode, base in (("train_forward", 0.31), ("inference", 0.12), ("train_step", 0.94)):
            for method, factor in (("none", 1.0), ("gated", 1.45), ("removed", 0.82)):
                ms = base * factor * chance.uniform(0.95, 1.05)
                runs.append({"setting": setting, "method": method, "batch": 32, "mode": mode, "ms": ms,
                             "ms_spread": [ms * 0.97, ms * 1.06], "memory_mib": 40 * factor})  # fmt: skip
    return result("timing", runs)


def study() -> list[dict[str, Any]]:
    """The whole: six settings, seven methods, ten seeds, a hundred fractions."""
    return [table1(), figure2(), figure3(), figure1(), prices(), figure4(), timing()]


def demo(gates: bool = True) -> dict[str, Any]:
    """What ``bmrs demo`` writes, and, where asked, the gates it may write too."""
    layers = {"conv1": (6, 3), "conv2": (16, 6), "fc1": (120, 11), "fc2": (84, 11)}
    content: dict[str, Any] = {
        "before": {"accuracy": 0.98886, "parameters": 61706, "multiply_adds": 416520, "epoch_seconds": 0.149},
        "after": {"accuracy": 0.97772, "parameters": 2068, "multiply_adds": 129830, "epoch_seconds": 0.1017},
        "units": {name: {"before": b, "after": a} for name, (b, a) in layers.items()},
        "pruning_epoch_seconds": {"first": 0.4877, "last": 0.2287},
        "provenance": {
            "command": "bmrs demo", "date": "2025-11-02T14:05:11+00:00", "machine": "some processor, 2 cores",
            "versions": {"bmrs": "0.3.0", "python": "3.11.2", "torch": "2.13.0"}, "commit": "66714f6a",
            "data": "digits", "network": "lenet5", "criterion": "BMRS_N(tolerance=0.9189)",
            "recipe": {"epochs": 40, "fine_tune": 10, "batch": 32, "learning_rate": 0.003, "phi_rate": 10.0,
                       "price": "uniform", "strength": 1.0, "seed": 0},
            "seeds": 1, "device": "cpu",
        },
    }  # fmt: skip
    if gates:
        chance = random.Random(8)
        kept = [k < a for _, (b, a) in layers.items() for k in range(b)]
        content["gates"] = {
            "layer": [name for name, (b, _) in layers.items() for _ in range(b)],
            "mean": [chance.betavariate(8, 4) if k else chance.gauss(0.064, 0.004) for k in kept],
            "delta_f": [-math.exp(chance.gauss(6.3, 0.8)) if k else -chance.uniform(0.3, 0.9) for k in kept],
            "removed_at": [0 if k else chance.randint(8, 30) for k in kept],
        }
        content["history"] = [
            {"epoch": e, "units": round(31 + 195 / (1 + math.exp((e - 15) / 3)))} for e in range(1, 41)
        ]
    return content
