"""What the tables and the report say of measured times."""

from bmrs.study.large.tables import as_timing


def run(method, *measured, setting="resnet50-cifar10"):
    rows = [
        {"network": network, "how": "graph", "device": "cuda", "batch": 256, "ms": ms, "ms_spread": [ms, ms],
         "memory_mib": None, "images_per_second": 256e3 / ms}
        for network, ms in measured
    ]  # fmt: skip
    return {"setting": setting, "method": method, "seed": 0, "physical": {"runs": rows}}


def times(*runs):
    content = {"name": "table2", "provenance": {}, "settings": {}, "energy": {}, "runs": list(runs)}
    return [(row["method"], row["ms"]) for found in as_timing(content) for row in found["runs"]]


def test_the_whole_network_is_shown_as_it_took_turns_with_the_pruned_ones():
    alone = run("none", ("whole", 9.0))
    assert times(alone, run("bmrs_n", ("whole", 6.0), ("pruned", 3.0))) == [("none", 6.0), ("BMRS_N", 3.0)]
    assert times(alone) == [("none", 9.0)]
    other = run("none", ("whole", 5.0), setting="vit-cifar10")
    assert times(alone, run("snr", ("whole", 6.0), ("pruned", 4.0)), other) == [
        ("none", 6.0), ("SNR", 4.0), ("none", 5.0)
    ]  # fmt: skip
    assert times({**alone, "physical": None}) == []
