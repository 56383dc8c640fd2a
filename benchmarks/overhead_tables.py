"""The overhead benchmark's numbers as Markdown."""

from typing import Any


def markdown(found: dict[str, Any]) -> str:
    made = found["provenance"]
    where = made["machine"] if made["device"].startswith("cuda") else f"{made['machine']}, {made['threads']} thread(s)"
    done = [row for row in found["rows"] if "problem" not in row]
    lines = [
        f"# What training with gates costs: {where}",
        "",
        "A training step with Adam, with gates over without: the median of the rounds' ratios, in brackets their",
        "quartiles. The floor is what the gates' bytes and kernels take at the least on this device.",
        "",
        "| network | batch | mode | plain | per example | per batch | target | floor, per example | GB: plain, gated |",
        "|---|---:|---|---:|---:|---:|---:|---:|---:|",
    ]
    for row in found["rows"]:
        if "problem" in row:
            lines.append(f"| {row['row']} | | {row['mode']} | {row['problem'][:80].replace('|', ' ')} | | | | | |")
            continue
        step, memory = row["step"], row["memory_gb"]
        mode = ", ".join(filter(None, [row["mode"], row["bf16"] and "bf16", row["channels_last"] and "channels-last"]))
        gb = "" if memory["None"] is None else f"{memory['None']:.1f}, {memory['example']:.1f}"
        if gb and row["memory_target_gb"]:
            gb += f" (target {row['memory_target_gb']:.1f})"
        lines.append(
            f"| {row['row']} | {row['batch']} | {mode} | {step['ms']['None']:.3g} ms | {_ratio(step, 'example')} | "
            f"{_ratio(step, 'batch')} | {row['target']:.2f}× | {row['floor']['example']['ratio']:.2f}× | {gb} |"
        )
    for row in done:
        if "by hand" in row["step"]["ratio"]:
            lines += [
                "",
                f"{row['row']}, {row['mode']}: the same gates in the network's own code, without a hook, take "
                f"{_ratio(row['step'], 'by hand')}.",
            ]
    eager = [row for row in done if "inference" in row]
    if eager:
        share = f"{eager[0]['removed_fraction']:.0%}"
        lines += [
            "",
            f"Inference over the plain network's, before removal and with {share} of all units gone; seconds of what a",
            "Pruner does once.",
            "",
            f"| network | units | with gates | in folded() | {share} removed | discovery | proof and gates | prune() | "
            "finish() |",
            "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
        ]
        for row in eager:
            took = row["seconds"]["example"]
            lines.append(
                f"| {row['row']}, batch {row['batch']} | {row['units']:,} | {_ratio(row['inference'], 'example')} | "
                f"{_ratio(row['inference_folded'], 'example')} | {_ratio(row['inference_removed'], 'example')} | "
                f"{took['discovery']:.1f} s | "
                f"{took['proof and gates']:.1f} s | {took['prune()']:.2f} s | {took['finish()']:.2f} s |"
            )
    if found["sweep"]:
        lines += [
            "",
            "A draw with its gradient, and the gradient of the KL, over units and examples:",
            "",
            "| units | examples | ms | ns per unit and example |",
            "|---:|---:|---:|---:|",
            *(f"| {p['units']:,} | {p['examples']} | {p['ms']:.3g} | {p['ns_each']:.3g} |" for p in found["sweep"]),
        ]
    constants = found["constants"]
    each = f"{constants['eager_kernel_us']:.1f} µs"
    if "graph_kernel_us" in constants:
        each += f", {constants['graph_kernel_us']:.2f} µs in a graph"
    how = "compiled C" if made["compiled_c"] else "plain torch"
    lines += [
        "",
        f"A copy moves {constants['bandwidth'] / 1e9:,.0f} GB/s; a kernel that does nothing takes {each}.",
        f"Gates on a processor: {how}.",
        "",
        f"`{made['command']}`, {made['date']}, commit {made['commit']}, torch {made['versions']['torch']}.",
        "",
    ]  # fmt: skip
    return "\n".join(lines)


def _ratio(found: dict[str, Any], name: str) -> str:
    low, high = found["ratio_quartiles"][name]
    return f"**{found['ratio'][name]:.2f}×** ({low:.2f}–{high:.2f})"
