"""Made-up results of every kind, close to what real studies find: six settings, ten seeds."""

import math

import numpy as np
import torch

from bmrs import evidence
from bmrs.posterior import TruncatedLogNormal

LAYERS = {
    "mlp-mnist": {f"fc{i}": 100 for i in range(1, 9)},
    "mlp-fashion-mnist": {f"fc{i}": 150 for i in range(1, 3)},
    "mlp-cifar10": {f"fc{i}": 150 for i in range(1, 7)},
    "lenet5-mnist": {"conv1": 6, "conv2": 16, "fc1": 120, "fc2": 84},
    "lenet5-fashion-mnist": {"conv1": 6, "conv2": 16, "fc1": 120, "fc2": 84},
    "lenet5-cifar10": {"conv1": 18, "conv2": 48, "fc1": 360, "fc2": 252},
    "mlp-digits": {"fc1": 100, "fc2": 100},
    "lenet5-digits": {"conv1": 6, "conv2": 16, "fc1": 120, "fc2": 84},
}
SIX = tuple(key for key in LAYERS if not key.endswith("digits"))
METHODS = ("none", "l2", "mean", "snr", "bmrs_n", "bmrs_u8", "bmrs_u4")
PARAMETERS = {"mlp-mnist": 174_210, "mlp-fashion-mnist": 177_910, "mlp-cifar10": 575_860}
# published compression and accuracy of (mean, snr, bmrs_n, bmrs_u8, bmrs_u4), in percent
FOUND = {
    "mlp-mnist": ((54.1, 97.0), (59.1, 97.0), (49.8, 97.0), (49.0, 97.0), (54.3, 97.0)),
    "mlp-fashion-mnist": ((91.9, 85.7), (99.7, 13.7), (93.0, 84.8), (92.4, 85.3), (91.8, 85.8)),
    "mlp-cifar10": ((78.0, 43.3), (76.7, 43.8), (76.4, 43.5), (76.7, 43.3), (77.0, 43.5)),
    "lenet5-mnist": ((86.3, 97.2), (85.6, 97.4), (85.8, 97.3), (86.3, 97.3), (85.8, 97.4)),
    "lenet5-fashion-mnist": ((87.1, 83.2), (86.5, 83.8), (86.7, 83.9), (86.9, 83.7), (87.4, 83.4)),
    "lenet5-cifar10": ((60.1, 66.8), (61.3, 66.5), (58.5, 66.8), (59.3, 66.9), (58.7, 66.4)),
}
WHOLE = {
    "mlp-mnist": 97.5, "mlp-fashion-mnist": 88.3, "mlp-cifar10": 45.0, "lenet5-mnist": 99.1,
    "lenet5-fashion-mnist": 89.3, "lenet5-cifar10": 67.7, "mlp-digits": 97.0, "lenet5-digits": 98.5,
}  # fmt: skip


def _content(kind, settings, runs, networks=70):
    return {
        "kind": kind,
        "provenance": {
            "command": f"bmrs study {kind} --out runs/made",
            "date": "2025-01-02T03:04:05+00:00",
            "machine": "Made-up GPU",
            "versions": {"bmrs": "0.1.0", "python": "3.11.2", "torch": "2.11.0"},
            "commit": "0123456789abcdef",
            "device": "cuda",
        },
        "settings": {
            key: {
                "network": key.partition("-")[0],
                "data": key.partition("-")[2],
                "layers": LAYERS[key],
                "batch": 128,
                "learning_rate": 8.5e-4,
                "epochs": 50,
                "fine_tune": 10,
                "parameters": PARAMETERS.get(key, 61_706),
                "multiply_adds": 2 * PARAMETERS.get(key, 61_706),
                "seconds": 60.0 + i,
                "networks": networks,
            }
            for i, key in enumerate(settings)
        },
        "runs": runs,
        "energy": {"kwh": 0.0123, "co2_g": 4.1, "how": "measured", "note": "The GPU alone, by its own counter."},
    }


def _continuous_run(rng, key, method, seed, compression, accuracy, price="layer", strength=1.0):
    parameters = PARAMETERS.get(key, 61_706)
    removed = 0.0 if method == "none" else float(np.clip(rng.normal(compression, 1.2), 0, 99.9)) / 100
    actual = 0.0 if method == "none" else 1.0 - (1.0 - removed) * 0.6
    kept = {name: max(1, round(units * (1 - removed))) for name, units in LAYERS[key].items()}
    total = sum(LAYERS[key].values())
    history = [
        {"epoch": e, "units": total - round((total - sum(kept.values())) * e / 50), "published": removed * e / 50}
        for e in range(1, 51)
    ]
    return {
        "setting": key,
        "method": method,
        "price": price,
        "strength": strength,
        "seed": seed,
        "accuracy": float(np.clip(rng.normal(accuracy, 0.25), 0, 100)) / 100,
        "validation": float(np.clip(rng.normal(accuracy, 0.3), 0, 100)) / 100,
        "compression": {"published": removed, "actual": actual},
        "parameters": round(parameters * (1 - actual)),
        "multiply_adds": round(2 * parameters * (1 - actual)),
        "units": kept,
        "history": history,
        "emptied": ["fc2"] if method == "l2" else [],
    }


def continuous(settings=SIX, methods=METHODS, seeds=10):
    """Kind "continuous", as for Table 1."""
    rng, runs = np.random.default_rng(0), []
    for key in settings:
        for method in methods:
            for seed in range(seeds):
                runs.append(_continuous_run(rng, key, method, seed, *_expected(key, method)))
    return _content("continuous", settings, runs)


def _expected(key, method):
    if method == "none":
        return 0.0, WHOLE[key]
    if method == "l2":
        return 50.0, 10.0
    found = FOUND.get(key, ((80.0, 95.0),) * 5)
    return found[("mean", "snr", "bmrs_n", "bmrs_u8", "bmrs_u4").index(method)]


def prices(settings=SIX, seeds=10):
    """Kind "continuous", BMRS_N at every price."""
    rng, runs = np.random.default_rng(1), []
    offers = {("layer", 1.0): (0, 0), ("uniform", 1.0): (1, 2.5), ("params", 0.5): (2, 2.8), ("elbo", 1.0): (-45, 3.5)}
    for key in settings:
        compression, accuracy = _expected(key, "bmrs_n")
        for seed in range(seeds):
            runs.append(_continuous_run(rng, key, "none", seed, 0.0, WHOLE[key]))
            for (price, strength), (more, better) in offers.items():
                capped = min(accuracy + better, WHOLE[key])
                run = _continuous_run(rng, key, "bmrs_n", seed, compression + more, capped, price, strength)
                runs.append(run)
    return _content("continuous", settings, runs, networks=50)


def by_p1(settings=("lenet5-cifar10",), p1s=(1, 2, 4, 6, 8, 10, 12), seeds=10):
    """Kind "continuous", BMRS_U for several p₁, with None and BMRS_N for comparison."""
    rng, runs = np.random.default_rng(2), []
    for key in settings:
        for seed in range(seeds):
            runs.append(_continuous_run(rng, key, "none", seed, 0.0, WHOLE[key]))
            runs.append(_continuous_run(rng, key, "bmrs_n", seed, 58.5, 66.8))
            for p1 in p1s:
                collapse = 40.0 if p1 == 1 else 0.0
                at = (57.0 + 20.0 * math.exp(-p1 / 2), 66.9 - collapse)
                runs.append(_continuous_run(rng, key, f"bmrs_u{p1}", seed, *at))
    return _content("continuous", settings, runs)


_SHAPES = {"l2": (0.55, 6), "gradient": (0.6, 7), "mean": (0.97, 14), "snr": (1.0, 18), "bmrs_n": (0.99, 18)}


def post_training(settings=SIX, methods=("l2", "mean", "snr", "bmrs_n", "bmrs_u8", "bmrs_u4", "gradient"), seeds=10):
    """Kind "post-training": flat, then a fall, later for a good ranking."""
    rng, runs = np.random.default_rng(3), []
    fractions = np.arange(1, 101) / 100
    for key in settings:
        stop = _expected(key, "bmrs_n")[0] / 100
        for seed in range(seeds):
            whole = float(rng.normal(WHOLE[key], 0.2)) / 100
            for method in methods:
                where, steep = _SHAPES.get(method, (0.97, 11))
                middle = np.clip(where * (stop + 0.06) + rng.normal(0, 0.015), 0.05, 0.985)
                x = 1 - (1 - fractions) ** 1.4
                fall = 1 / (1 + np.exp(steep * 2 * (x - middle)))
                start = 1 / (1 + math.exp(-steep * 2 * middle))
                y = 0.1 + (whole - 0.1) * fall / start + rng.normal(0, 0.002, 100)
                y[-1] = 0.1
                runs.append(
                    {
                        "setting": key,
                        "method": method,
                        "seed": seed,
                        "fractions": fractions.tolist(),
                        "compression": {"published": x.tolist(), "actual": (1 - (1 - x) * 0.8).tolist()},
                        "accuracy": y.tolist(),
                        "whole": whole,
                        "boundary": _boundary(rng, method, stop, fractions, x, y),
                    }
                )
    return _content("post-training", settings, runs, networks=10)


def _boundary(rng, method, stop, fractions, x, y):
    if method in ("l2", "gradient"):
        return None
    shift = {"bmrs_u4": -0.04, "bmrs_u8": -0.02}.get(method, 0.0)
    at = int(np.clip(np.searchsorted(x, stop + shift + rng.normal(0, 0.012)), 0, len(x) - 1))
    published_at = float(x[at])
    return {
        "fraction": float(fractions[at]),
        "published": published_at,
        "actual": 1 - (1 - published_at) * 0.8,
        "accuracy": float(y[at]),
    }


def correlations(settings=SIX, seeds=10):
    """Kind "correlations": BMRS_N close to SNR, BMRS_U to nothing."""
    rng, runs = np.random.default_rng(4), []
    methods = ["l2", "mean", "snr", "bmrs_n", "bmrs_u8", "bmrs_u4"]
    middle = np.array(
        [
            [1.0, 0.35, 0.42, 0.41, -0.05, 0.02],
            [0.35, 1.0, 0.81, 0.80, -0.31, 0.12],
            [0.42, 0.81, 1.0, 0.98, -0.24, 0.18],
            [0.41, 0.80, 0.98, 1.0, -0.22, 0.19],
            [-0.05, -0.31, -0.24, -0.22, 1.0, 0.55],
            [0.02, 0.12, 0.18, 0.19, 0.55, 1.0],
        ]
    )
    for key in settings:
        for seed in range(seeds):
            noise = rng.normal(0, 0.03, middle.shape)
            spearman = np.clip(middle + (noise + noise.T) / 2, -1, 1)
            np.fill_diagonal(spearman, 1.0)
            runs.append({"setting": key, "seed": seed, "methods": methods, "spearman": spearman.tolist()})
    return _content("correlations", settings, runs, networks=10)


def posteriors(settings=SIX, seeds=2):
    """Kind "posteriors": real ΔF of gates that were forgotten, learned, or in between."""
    generator, runs = torch.Generator().manual_seed(5), []
    for key in settings:
        layer = [name for name, units in LAYERS[key].items() for _ in range(units)]
        for seed in range(seeds):
            n = len(layer)
            part = torch.rand(n, generator=generator)
            noise = torch.randn(2, n, generator=generator, dtype=torch.float64)
            forgotten, learned = part < 0.62, part > 0.72
            mu = torch.where(forgotten, -9.0 + 1.5 * noise[0], torch.where(learned, 0.4 * noise[0], -1 + noise[0]))
            log_sigma = torch.where(forgotten, 3.6 + 0.3 * noise[1], torch.where(learned, -3 + noise[1], 1 + noise[1]))
            q = TruncatedLogNormal(mu, log_sigma)
            found = evidence.scores(q)
            runs.append(
                {
                    "setting": key,
                    "seed": seed,
                    "mu": mu.tolist(),
                    "log_sigma": log_sigma.tolist(),
                    "mean": found.mean.tolist(),
                    "snr": found.snr.tolist(),
                    "delta_f": {
                        "bmrs_n": found.delta_f.tolist(),
                        "bmrs_u8": evidence.interval(q, 8).tolist(),
                        "bmrs_u4": evidence.interval(q, 4).tolist(),
                    },
                    "layer": layer,
                }
            )
    return _content("posteriors", settings, runs, networks=seeds)


def timing(settings=SIX, batch=32):
    """Kind "timing": gates cost little, and less is faster."""
    runs = []
    for i, key in enumerate(settings):
        for method, factor in (("none", 1.0), ("gated", 1.2), ("removed", 0.8)):
            for mode, base in (("train_forward", 0.21), ("inference", 0.15), ("train_step", 0.9)):
                ms = base * factor * (1 + 0.1 * i)
                run = {"setting": key, "method": method, "batch": batch, "mode": mode, "ms": ms}
                runs.append(run | {"ms_spread": [0.97 * ms, 1.08 * ms], "memory_mib": 40.0 * factor + i})
    return _content("timing", settings, runs)


def whole_study():
    """One of every kind."""
    return [continuous(), prices(), by_p1(), post_training(), correlations(), posteriors(), timing()]
