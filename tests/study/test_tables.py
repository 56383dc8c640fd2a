import copy
import re

import numpy as np
import pytest

from bmrs.study import footers, markup, tables
from tests.study import made_results

UNESCAPED = re.compile(r"(?<!\\)[_#^~](?![{2])")


def rows(markdown, title):
    """The cells of the table under that heading, header first."""
    body = markdown.replace("\u00a0", " ").split(f"### {title}")[1].split("###")[0]
    lines = [line for line in body.splitlines() if line.startswith("|")]
    assert len({len(line) for line in lines}) == 1, "the source is not aligned"
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines if "---" not in line]


def check_latex(text):
    """The structure that makes it compile: balanced, one width per table, nothing special left as it was."""
    assert text.isascii()
    assert text.startswith("% \\usepackage{booktabs}")
    for name in ("table*", "tabular"):
        assert text.count(rf"\begin{{{name}}}") == text.count(rf"\end{{{name}}}") > 0
    for command in ("toprule", "midrule", "bottomrule"):
        assert text.count(rf"\{command}") == text.count(r"\begin{tabular}")
    for spec, body in re.findall(r"\\begin\{tabular\}\{([lr]+)\}(.*?)\\end\{tabular\}", text, re.DOTALL):
        lines = [line for line in body.splitlines() if line.endswith(r"\\")]
        assert lines
        for line in lines:
            spans = [int(n) for n in re.findall(r"\\multicolumn\{(\d+)\}", line)]
            cells = len(re.findall(r"(?<!\\)&", line)) + 1
            assert cells - len(spans) + sum(spans) == len(spec)
    plain = re.sub(r"\$[^$]*\$|^%.*$", "", text, flags=re.MULTILINE)
    assert "$" not in plain.replace(r"\$", "")
    assert not UNESCAPED.search(plain)
    assert plain.count("{") - plain.count(r"\{") == plain.count("}") - plain.count(r"\}")
    assert not re.search(r"(?<!\\)%", plain)


def test_table1_shows_numpys_numbers_beside_the_papers():
    content = made_results.continuous()
    made = tables.table1(content)
    table = rows(made.markdown, "MLP: compression as the paper counts it")
    header = ["method", "", "MNIST ours", "MNIST paper", "Fashion-MNIST ours", "Fashion-MNIST paper"]
    assert table[0] == [*header, "CIFAR-10 ours", "CIFAR-10 paper"]
    assert [row[0] for row in table[1::2]] == ["None", "L2", "E[θ]", "SNR", "BMRS_N", "BMRS_U-8", "BMRS_U-4"]
    runs = [r for r in content["runs"] if (r["setting"], r["method"]) == ("mlp-mnist", "bmrs_n")]
    at = [row[0] for row in table].index("BMRS_N")
    for row, values, paper in (
        (table[at], [100 * r["compression"]["published"] for r in runs], "48.86 ± 1.32"),
        (table[at + 1], [100 * r["accuracy"] for r in runs], "96.95 ± 0.19"),
    ):
        assert row[2] == f"{np.mean(values):.2f} ± {np.std(values, ddof=1):.2f}"
        assert row[3] == paper
    actual = rows(made.markdown, "LeNet-5: actual compression")
    assert actual[0] == ["method", "", "MNIST", "Fashion-MNIST", "CIFAR-10"]
    runs = [r for r in content["runs"] if (r["setting"], r["method"]) == ("lenet5-cifar10", "snr")]
    at = [row[0] for row in actual].index("SNR")
    values = [100 * r["compression"]["actual"] for r in runs]
    assert actual[at][4] == f"{np.mean(values):.2f} ± {np.std(values, ddof=1):.2f}"
    assert actual[at + 1][4] == f"{np.mean([r['parameters'] for r in runs]):,.0f}"
    check_latex(made.latex)
    assert r"BMRS$_{\mathcal{N}}$ & comp. (\%)" in made.latex


def with_accuracy(accuracy):
    content = made_results.continuous(settings=("mlp-mnist",), methods=("bmrs_n",), seeds=2)
    for run in content["runs"]:
        run["accuracy"] = accuracy / 100
        run["compression"]["published"] = 0.4886
    return tables.table1(content)


def test_marks_only_beyond_the_border():
    # published: 96.95 ± 0.19, so the border is one point
    for accuracy, shown, total in (
        (97.95, "97.95 ± 0.00", 0),
        (97.96, "↑ 97.96 ± 0.00", 1),
        (95.9, "↓ 95.90 ± 0.00", 1),
    ):
        made = with_accuracy(accuracy)
        assert rows(made.markdown, "MLP: compression")[2][2] == shown
        assert f"if that is more: {total} of 2 numbers" in made.markdown
        assert (r"$\uparrow$ 97.96" in made.latex) == (accuracy == 97.96)


def test_gaps_one_seed_and_data_without_a_paper():
    content = made_results.continuous(settings=("mlp-digits", "mlp-mnist"), methods=("none", "bmrs_n"), seeds=1)
    content["runs"] = [r for r in content["runs"] if (r["setting"], r["method"]) != ("mlp-digits", "bmrs_n")]
    made = tables.table1(content)
    table = rows(made.markdown, "MLP: compression")
    assert table[0] == ["method", "", "MNIST ours", "MNIST paper", "digits ours"]
    assert "±" not in "".join(row[2] for row in table)
    assert table[3][4] == table[4][4] == "–"
    assert "n = 1: one seed" in made.markdown
    check_latex(made.latex)
    more = made_results.continuous(settings=("mlp-mnist",), methods=("none", "snr"), seeds=3)
    more["runs"] = more["runs"][:4]  # of SNR one seed alone
    assert rows(tables.table1(more).markdown, "MLP: compression")[4][2].endswith("(n = 1)")


def test_other_prices_are_not_table1():
    content = made_results.prices(settings=("mlp-mnist",))
    content["runs"] = [r for r in content["runs"] if r["price"] == "elbo"]
    with pytest.raises(ValueError, match="Table 1 is made of those"):
        tables.table1(content)


def test_prices_table():
    content = made_results.prices()
    made = tables.prices_table(content)
    table = rows(made.markdown, "LeNet-5: actual compression and accuracy at every price")
    assert [row[0] for row in table[1:]] == [
        "None", "paper's BMRS_N, layer", "layer", "uniform", "params, s = 0.5", "elbo",
    ]  # fmt: skip
    assert table[2][1:3] == ["86.90 ± 1.15", "95.59 ± 0.94"]
    runs = [r for r in content["runs"] if r["setting"] == "lenet5-cifar10" and r["price"] == "params"]
    for cell, values in (
        (table[5][5], [100 * r["compression"]["actual"] for r in runs]),
        (table[5][6], [100 * r["accuracy"] for r in runs]),
    ):
        assert cell == f"{np.mean(values):.2f} ± {np.std(values, ddof=1):.2f}"
    check_latex(made.latex)


def test_timing_table():
    content = made_results.timing(settings=("mlp-mnist", "mlp-digits"))
    content["runs"] = [r for r in content["runs"] if (r["method"], r["mode"]) != ("removed", "train_step")]
    made = tables.timing_table(content)
    table = rows(made.markdown, "Milliseconds for a batch of 32")
    wanted = ["", "with gates", "0.252 [0.244, 0.272]", "20.02", "0.180 [0.175, 0.194]", "1.14", "1.08 [1.05, 1.17]"]
    assert table[2] == wanted
    assert table[3][3:] == ["–", "0.120 [0.116, 0.130]", "–", "–"]
    memory = rows(made.markdown, "Memory for a batch of 32, MiB")
    assert memory[0] == ["setting", "", "forward, training", "forward, inference", "whole step"]
    assert memory[3] == ["", "after removal", "32.0", "32.0", "–"]
    assert table[4][3] == "–"  # the paper has no digits
    assert "another machine" in made.markdown
    assert "a whole training step takes 1.20 times" in made.markdown
    check_latex(made.latex)


def test_what_stands_below():
    text = tables.table1(made_results.continuous()).markdown
    for words in (
        "`bmrs study continuous --out runs/made`", "seeds 0–9", "device cuda", "commit 0123456789abcdef",
        "torch 2.11.0", "2025-01-02", "6 min 15 s in all for 420 networks", "0.0123 kWh, 4.1 g CO₂, measured",
        "L2 on MLP, MNIST (10 of 10)",
    ):  # fmt: skip
        assert words in text
    bare = copy.deepcopy(made_results.continuous(settings=("mlp-mnist",), seeds=2)) | {"provenance": {}, "settings": {}}
    bare["energy"] = {"kwh": None, "co2_g": None, "how": "unavailable", "note": "No counter here."}
    assert footers.lines(bare) == ["Seeds 0, 1.", "Energy: unavailable. No counter here."]


def test_hostile_text_stays_text():
    content = made_results.continuous(settings=("mlp-mnist",), methods=("none",), seeds=2)
    for run in content["runs"]:
        run["method"] = "50%_of|a$b\\{&#^~\n"
    content["provenance"]["command"] = "bmrs `rm` --x_y 100%"
    made = tables.table1(content)
    assert r"50%_of\|a$b" in made.markdown
    check_latex(made.latex)
    assert markup.latex_text("a_b 5% `x --y` ½ é") == r"a\_b 5\% \texttt{x -{}-y} $\frac{1}{2}$ e"


@pytest.mark.parametrize(
    ("draw", "content"),
    [
        (tables.table1, made_results.continuous),
        (tables.prices_table, made_results.prices),
        (tables.timing_table, made_results.timing),
    ],
)
def test_every_float_says_how_it_was_made(draw, content):
    # Floats land on pages of their own: a note under the last one does not reach the others.
    made = draw(content(("mlp-mnist", "lenet5-mnist")))
    floats = made.latex.split(r"\begin{table*}")[1:]
    assert len(floats) > 1
    for one in floats:
        assert one.count("Made by \\texttt{bmrs study ") == 1
    assert made.markdown.count("Made by `bmrs study ") == 1
    assert sum("Energy: 0.0123 kWh" in one for one in floats) == 1


def test_captions_name_the_counting_and_the_seeds():
    captions = re.findall(r"\\caption\{(.*)\}", tables.table1(made_results.continuous(("mlp-mnist",), seeds=3)).latex)
    assert captions == [
        "MLP: compression as the paper counts it, and accuracy, ours and the paper's; n = 3 seeds",
        "MLP: actual compression, and the mean of what is left; n = 3 seeds",
    ]
    assert "; one seed}" in tables.prices_table(made_results.prices(("mlp-mnist",), seeds=1)).latex
