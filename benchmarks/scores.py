"""ΔF, SNR and E[θ] of millions of units in one call, beside scipy unit by unit, on one core or a GPU.

    python benchmarks/scores.py                  # writes results/scores.json and results/scores.md
    python benchmarks/scores.py --device cuda    # the library alone, into results/scores_cuda.*

Three ways to do it with scipy, from the plainest to the most careful:

* distribution: a frozen ``scipy.stats.truncnorm`` per unit and its ``expect`` and ``logpdf``;
* quadrature: ``scipy.integrate.quad`` on a density written by hand, its peak taken out, over a window fitted to it;
* closed form: the textbook expressions with ``scipy.special.log_ndtr``, as scalars.
"""

import argparse
import json
import math
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from scipy import integrate, special, stats

import bmrs
from bmrs.study.provenance import provenance

A, B = -20.0, 0.0
Triple = tuple[float, float, float]  # E[θ], SNR, ΔF


def by_distribution(mu: float, sigma: float) -> Triple:
    q = stats.truncnorm((A - mu) / sigma, (B - mu) / sigma, loc=mu, scale=sigma)
    first, second = q.expect(np.exp), q.expect(lambda x: np.exp(2 * x))
    return first, first / math.sqrt(second - first**2), q.logpdf(A) + math.log(B - A)


def by_quadrature(mu: float, sigma: float) -> Triple:
    peak = min(max(mu, A), B)
    reach = min(40 * sigma, 40 * sigma**2 / abs(mu - peak) if mu != peak else math.inf, B - A)
    low, high = max(A, peak - reach), min(B, peak + reach)

    def density(x: float) -> float:
        return math.exp(-0.5 * (x - peak) * (x + peak - 2 * mu) / sigma**2)

    mass = integrate.quad(density, low, high)[0]
    mean = integrate.quad(lambda x: math.exp(x) * density(x), low, high)[0] / mass
    variance = integrate.quad(lambda x: (math.exp(x) - mean) ** 2 * density(x), low, high)[0] / mass
    at_a = -0.5 * (A - peak) * (A + peak - 2 * mu) / sigma**2 - math.log(mass)
    return mean, mean / math.sqrt(variance), at_a + math.log(B - A)


def by_closed_form(mu: float, sigma: float) -> Triple:
    alpha, beta = (A - mu) / sigma, (B - mu) / sigma

    def log_z(low: float, high: float) -> float:
        upper, lower = special.log_ndtr(high), special.log_ndtr(low)
        return upper + math.log1p(-math.exp(lower - upper))

    z = log_z(alpha, beta)
    first = mu + sigma**2 / 2 + log_z(alpha - sigma, beta - sigma) - z
    second = 2 * mu + 2 * sigma**2 + log_z(alpha - 2 * sigma, beta - 2 * sigma) - z
    at_a = -0.5 * alpha**2 - math.log(sigma) - 0.5 * math.log(2 * math.pi) - z
    return math.exp(first), 1 / math.sqrt(math.expm1(second - 2 * first)), at_a + math.log(B - A)


def posteriors(units: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """μ in [-60, 20] and log σ in [-10, 5]: the whole range in which the library promises accuracy."""
    generator = torch.Generator().manual_seed(seed)
    mu = torch.empty(units, dtype=torch.float64).uniform_(-60, 20, generator=generator)
    log_sigma = torch.empty(units, dtype=torch.float64).uniform_(-10, 5, generator=generator)
    return mu, log_sigma


def time_library(units: int, repeats: int, device: str) -> float:
    """Median seconds per unit."""
    q = bmrs.TruncatedLogNormal(*(p.to(device, torch.float32) for p in posteriors(units)))
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    bmrs.evidence.scores(q)
    times = []
    for _ in range(repeats):
        wait()
        start = time.perf_counter()
        bmrs.evidence.scores(q)
        wait()
        times.append(time.perf_counter() - start)
    return statistics.median(times) / units


def time_scipy(method: Callable[[float, float], Triple], units: int) -> dict[str, float]:
    """Seconds per unit, and the share of units it gets right: all three scores within 1 % of the library's."""
    mu, log_sigma = posteriors(units)
    # The scipy versions take the spike's limit, q's density at a over the prior's: so does the comparison.
    q = bmrs.TruncatedLogNormal(mu, log_sigma)
    want = [score.tolist() for score in bmrs.evidence.scores(q, scale=1e-12)]
    pairs = list(zip(mu.tolist(), log_sigma.exp().tolist(), strict=True))
    results: list[Triple | None] = []
    start = time.perf_counter()
    for pair in pairs:
        try:
            results.append(method(*pair))
        except (ValueError, OverflowError, ZeroDivisionError):
            results.append(None)
    seconds = (time.perf_counter() - start) / units
    right = sum(
        result is not None
        and all(
            math.isclose(got, score[i], rel_tol=0.01, abs_tol=0.01) for got, score in zip(result, want, strict=True)
        )
        for i, result in enumerate(results)
    )
    return {"seconds_per_unit": seconds, "right": right / units}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--most", type=int, default=10_000_000, help="units in the largest call")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--out", type=Path, default=Path("results"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    np.seterr(all="ignore")
    sizes = [n for n in (10_000, 100_000, 1_000_000, 10_000_000) if n <= options.most]
    library = {units: time_library(units, options.repeats, options.device) for units in sizes}
    scipy = {}
    if options.device == "cpu":
        scipy = {
            "distribution": time_scipy(by_distribution, 40),
            "quadrature": time_scipy(by_quadrature, 2000),
            "closed form": time_scipy(by_closed_form, 5000),
        }
    largest = library[sizes[-1]]
    for row in scipy.values():
        row["times_slower"] = row["seconds_per_unit"] / largest
    device = "cpu, one thread" if options.device == "cpu" else options.device
    made = provenance(seeds=1, device=device, repeats=options.repeats)
    name = "scores" if options.device == "cpu" else f"scores_{options.device}"
    options.out.mkdir(parents=True, exist_ok=True)
    content = {"library_seconds_per_unit": library, "scipy": scipy, "provenance": made}
    (options.out / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n")
    page = markdown(library, scipy, made)
    (options.out / f"{name}.md").write_text(page)
    print(page)


def markdown(library: dict[int, float], scipy: dict[str, dict[str, float]], made: dict[str, object]) -> str:
    lines = [
        "# ΔF, SNR and E[θ] of many units",
        "",
        f"Posteriors over μ in [-60, 20], log σ in [-10, 5]; float32 in and out; {made['device']}.",
        "",
        "| units in one call | ns per unit | all |",
        "|---:|---:|---:|",
        *(f"| {n:,} | {s * 1e9:.1f} | {s * n * 1e3:,.1f} ms |" for n, s in library.items()),
        "",
    ]
    if scipy:
        lines += [
            "The same with scipy, unit by unit. Right: all three scores within 1 % (or 0.01) of the library's.",
            "",
            "| scipy | µs per unit | times slower | units right |",
            "|---|---:|---:|---:|",
            *(
                f"| {name} | {row['seconds_per_unit'] * 1e6:,.0f} | {row['times_slower']:,.0f}× | {row['right']:.0%} |"
                for name, row in scipy.items()
            ),
            "",
        ]
    lines += [
        f"`{made['command']}`, {made['machine']}, {made['date']}, commit {made['commit']},",
        f"versions {made['versions']}.",
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
