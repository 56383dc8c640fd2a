"""The tables of benchmarks/scale.py: for results/scale.md, and between the marks of docs/scale.md.

python -m benchmarks.scale_tables        # makes both anew from results/scale.json
"""

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent


def size(number: float) -> str:
    """Bytes for people."""
    for unit, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if number >= unit:
            return f"{number / unit:,.{0 if number >= 100 * unit else 1}f} {name}"
    return f"{number:,.0f} B"


def duration(number: float) -> str:
    if number >= 1:
        return f"{number:,.1f} s"
    return f"{number * 1e3:,.1f} ms" if number >= 1e-3 else f"{number * 1e6:,.0f} µs"


def table(heads: list[str], rows: list[list[str]]) -> str:
    marks = ["---", *["---:"] * (len(heads) - 1)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [heads, marks, *rows])


def listed(content: dict[str, Any]) -> str:
    """What was found in the networks of full size, and what was proved."""
    names = list(content["listed"])
    found, proved = content["listed"], content["proved"]
    rows = [
        ["parameters", *(f"{found[n]['parameters']:,}" for n in names)],
        ["structures: the groups and the neurons of every layer", *(str(found[n]["structures"]) for n in names)],
        ["units", *(f"{found[n]['units']:,}" for n in names)],
        ["parameters that lie in units", *(f"{found[n]['share']:.1%}" for n in names)],
        ["counts are those of the formulas", *(_yes(found[n]["as_computed"]) for n in names)],
        ["processor time of listing, one core", *(duration(found[n]["cpu_seconds"]) for n in names)],
        ["by the clock", *(duration(found[n]["seconds"]) for n in names)],
        ["memory of the process, at most", *(size(found[n]["memory"]) for n in names)],
        ["two narrow layers: proved exact", *(f"{proved[n]['exact']} of {proved[n]['structures']}" for n in names)],
        ["they occupy the same dimensions", *(_yes(found[n]["as_in_two_narrow_layers"]) for n in names)],
    ]
    return table(["", *names], rows)


def _yes(value: bool) -> str:
    return "yes" if value else "**no**"


def constants(content: dict[str, Any], name: str) -> str:
    core, machine, found = content["core"], content["machine"], content["listed"][name]
    gpu = content["gpu"]["machine"]
    here = "measured here, one core"
    rows = [
        ["draw and its backward pass, per unit and row", f"{core['draw'] * 1e9:,.0f} ns", here],
        ["the gradient of the KL, per unit", f"{core['kl'] * 1e9:,.0f} ns", here],
        ["ΔF, SNR and E[θ], per unit", f"{core['scores'] * 1e9:,.0f} ns", here],
        ["memory of a draw at its peak, per unit and row", f"{core['draw_peak']:,.0f} B", here],
        ["record of what was removed, per unit, half of them gone", f"{found['record_bytes'] / found['units']:,.1f} B",
         f"measured on {name}"],
        ["writing it down, per unit", f"{found['record_seconds'] / found['units'] * 1e6:,.1f} µs", f"{here}, {name}"],
        *([f"ΔF, SNR and E[θ] of {float(units):,.0f} units, per unit", f"{one * 1e9:,.1f} ns", f"measured, {gpu}"]
          for units, one in content["gpu"]["scores"].items()),
        ["draw and KL on a GPU", "what their bytes take through memory", "computed"],
        ["operations in bf16, memory's bandwidth, memory",
         f"{machine['peak'] / 1e12:,.0f} T/s, {machine['bandwidth'] / 1e12:,.1f} TB/s, {size(machine['memory'])}",
         "published, H200"],
        ["from GPU to GPU, inside a node and between nodes",
         f"{machine['inside'] / 1e9:,.0f} and {machine['between'] / 1e9:,.0f} GB/s each way", "published"],
        ["share of the peak that training reaches", f"{machine['utilisation']:.0%}", "assumed"],
    ]  # fmt: skip
    lines = table(["", "value", "source"], rows)
    return lines


def _columns(content: dict[str, Any], name: str, part: str, keys: list[tuple[int, bool]], form: Any) -> str:
    runs = {(run["gpus"], run["per_example"]): run[part] for run in content["plans"][name]["runs"]}
    noise = {True: "per sequence", False: "per batch"}
    several = len({per for _, per in keys}) > 1
    heads = [f"{gpus} GPUs{', ' + noise[per] if several else ''}" for gpus, per in keys]
    rows = [[what, *(form(runs[key][what]) for key in keys)] for what in runs[keys[0]]]
    rows.append(["**together**", *(f"**{form(sum(runs[key].values()))}**" for key in keys)])
    gates = [sum(value for what, value in runs[key].items() if what.startswith("gates")) for key in keys]
    if any(gates):
        shares = [own / sum(runs[key].values()) for own, key in zip(gates, keys, strict=True)]
        rows.append(["of that the gates", *(f"{share:.2%}" for share in shares)])
    return table(["", *heads], rows)


def memory(content: dict[str, Any], name: str) -> str:
    return _columns(content, name, "memory", [(8, True), (64, True)], size)


def step(content: dict[str, Any], name: str) -> str:
    return _columns(content, name, "step", [(8, True), (8, False), (64, True), (64, False)], duration)


def prune(content: dict[str, Any], name: str) -> str:
    return _columns(content, name, "prune", [(8, True), (64, True)], duration)


def traffic(content: dict[str, Any], name: str) -> str:
    runs = {run["gpus"]: run for run in content["plans"][name]["runs"]}
    rows = [
        ["all that is gathered: 12 P (N−1)/N", *(size(run["traffic"]) for run in runs.values())],
        ["had only the cut rows to move", *(size(run["traffic_of_cut"]) for run in runs.values())],
    ]
    return table(["received by each GPU in a prune", *(f"{gpus} GPUs" for gpus in runs)], rows)


def _plain(content: dict[str, Any], name: str, part: str, head: str) -> str:
    return table([head, name], [[what, size(value)] for what, value in content["plans"][name][part].items()])


def prune_memory(content: dict[str, Any], name: str) -> str:
    return _plain(content, name, "prune_memory", "memory of each process, for the moment")


def checkpoints(content: dict[str, Any], name: str) -> str:
    return _plain(content, name, "checkpoints", "file")


PARTS = {
    "constants": constants, "memory": memory, "step": step, "prune": prune, "traffic": traffic,
    "prune_memory": prune_memory, "checkpoints": checkpoints,
}  # fmt: skip


def made_from(content: dict[str, Any], mark: str) -> str:
    """The table of a mark such as ``listed`` or ``step Llama-3-8B``."""
    part, _, name = mark.partition(" ")
    return listed(content) if part == "listed" else PARTS[part](content, name)


def filled(page: str, content: dict[str, Any]) -> str:
    """A page with the tables between its marks, ``<!-- table: step Llama-3-8B -->`` and ``<!-- end -->``."""

    def anew(found: re.Match[str]) -> str:
        return f"<!-- table: {found[1]} -->\n\n{made_from(content, found[1])}\n\n<!-- end -->"

    return re.sub(r"<!-- table: ([^>]+?) -->.*?<!-- end -->", anew, page, flags=re.DOTALL)


def results_page(content: dict[str, Any]) -> str:
    made = content["provenance"]
    lines = ["# Pruning an 8-billion-parameter decoder, on paper", "", listed(content)]
    for name in content["plans"]:
        lines += ["", f"## {name}"]
        for part in PARTS.values():
            lines += ["", part(content, name)]
    lines += [
        "",
        f"`{made['command']}`, {made['machine']}, {made['date']}, commit {made['commit']},",
        f"versions {made['versions']}.",
        "",
    ]
    return "\n".join(lines)


def write(root: Path) -> None:
    content = json.loads((root / "results" / "scale.json").read_text())
    (root / "results" / "scale.md").write_text(results_page(content))
    guide = root / "docs" / "scale.md"
    guide.write_text(filled(guide.read_text(), content))


if __name__ == "__main__":
    write(ROOT)
