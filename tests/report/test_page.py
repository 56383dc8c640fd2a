import base64
import hashlib
import json
import math
import re
from html.parser import HTMLParser

import numpy as np
import pytest
import torch
from torch import nn

import bmrs
from bmrs import report
from bmrs.report.curves import knee
from bmrs.report.digest import digest
from bmrs.report.page import embeddable
from bmrs.report.page import page as whole_page
from tests.report import made

HOSTILE = "</script><b onclick=alert(1)>&'\"<!--"
VOID = {"meta", "input", "col", "br", "link", "img", "path", "circle"}


class Reader(HTMLParser):
    """The page as a browser's parser sees it: tags in balance, text, scripts."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[tuple[str | None, str]] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open, f"not closed: {self.open}"

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "script":
            self.scripts.append((dict(attrs).get("type"), ""))

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag, f"</{tag}> closes another"

    def handle_data(self, data):
        if self.open and self.open[-1] == "script":
            self.scripts[-1] = (self.scripts[-1][0], self.scripts[-1][1] + data)
        elif not self.open or self.open[-1] != "style":
            self.words.append(data)

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", " ".join(self.words))

    @property
    def data(self):
        (content,) = [body for kind, body in self.scripts if kind == "application/json"]
        return json.loads(content)


def written(contents, tmp_path) -> str:
    return report.write(contents, tmp_path / "report.html").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def study():
    return made.study()


@pytest.fixture(scope="module")
def data(study):
    return digest(study)


@pytest.fixture(scope="module")
def page(study, tmp_path_factory):
    return written(study, tmp_path_factory.mktemp("page"))


def test_one_file_that_asks_for_nothing_else(page, tmp_path):
    assert len(page.encode()) < 3_000_000
    assert set(re.findall(r"https?://[^\"'\s]+", page)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"@import|url\((?!#)|url\((?=['\"])", page.replace("url(#${", "url(#"))
    reader = Reader(page)
    assert not [attributes for _, attributes in reader.tags if "src" in attributes]
    assert all(a["href"].startswith("#") for tag, a in reader.tags if tag == "a")
    assert "charts need JavaScript" in reader.text
    path = tmp_path / "new" / "folder" / "page.html"
    assert report.write([made.demo()], path) == path
    assert path.exists()


def test_the_policy_lets_only_the_pages_own_script_run(page):
    (script,) = [body for kind, body in Reader(page).scripts if kind is None]
    digest_of = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest_of}'" in page


def test_headline_and_glance_of_a_study(page, study):
    runs = [run for run in study[0]["runs"] if run["method"] in ("none", "bmrs_n")]
    gone, points = [], []
    for setting in made.LAYERS:
        of = {m: [r for r in runs if r["setting"] == setting and r["method"] == m] for m in ("none", "bmrs_n")}
        gone.append(100 * np.mean([r["compression"]["actual"] for r in of["bmrs_n"]]))
        accuracy = {m: 100 * np.mean([r["accuracy"] for r in of[m]]) for m in of}
        points.append(accuracy["bmrs_n"] - accuracy["none"])
    text = Reader(page).text
    assert f"BMRS_N removed {min(gone):.0f} to {max(gone):.0f} % of the parameters of six networks" in text
    assert f"changed by −{-min(points):.1f} to −{-max(points):.1f} points" in text
    assert "Ten seeds each" in text
    for value in gone:
        assert f"{value:.1f} %" in text


def test_the_table_has_ours_and_the_papers(page, study):
    ours = [r for r in study[0]["runs"] if r["setting"] == "lenet5-cifar10" and r["method"] == "snr"]
    accuracy = 100 * np.array([r["accuracy"] for r in ours])
    removed = 100 * np.array([r["compression"]["published"] for r in ours])
    text = Reader(page).text
    assert f"{accuracy.mean():.1f} ± {accuracy.std(ddof=1):.1f}" in text
    assert f"{removed.mean():.1f} ± {removed.std(ddof=1):.1f}" in text
    assert "paper 67.7 ± 0.5" in text
    assert "paper 70.3 ± 2.0" in text


@pytest.mark.parametrize(("shift", "mark"), [(0.0, None), (0.0099, None), (0.0111, "▲"), (-0.0111, "▼")])
def test_cells_far_from_the_paper_are_marked(tmp_path, shift, mark):
    # The paper's 97.43 with a deviation of 0.14: one point is the wider of the two limits.
    content = made.table1(1, ("mlp-mnist",))
    content["runs"] = [run for run in content["runs"] if run["method"] == "none"]
    content["runs"][0]["accuracy"] = 0.9743 + shift
    cells = written([content], tmp_path).split('class="results"')[1].split("</table>")[0]
    assert re.findall("[▲▼]", cells) == ([mark] if mark else [])


def test_curves_are_means_over_seeds_with_their_stop(study, data):
    curve = data["curves"]["mlp-mnist"]["methods"]["snr"]
    runs = [r for r in study[1]["runs"] if r["setting"] == "mlp-mnist" and r["method"] == "snr"]
    whole = np.array([r["whole"] for r in runs])
    accuracy = np.column_stack([whole, np.array([r["accuracy"] for r in runs])])
    assert curve["n"] == 10
    assert curve["fraction"] == pytest.approx([0.0, *runs[0]["fractions"]], abs=1e-4)
    assert curve["accuracy"] == pytest.approx(accuracy.mean(0), abs=1e-4)
    assert curve["sd"] == pytest.approx(accuracy.std(0, ddof=1), abs=1e-4)
    stops = np.array([[r["boundary"][k] for k in ("published", "actual", "accuracy")] for r in runs])
    assert curve["boundary"]["seeds"] == pytest.approx(stops, abs=1e-4)
    assert curve["boundary"]["actual"] == pytest.approx([stops[:, 1].mean(), stops[:, 1].std(ddof=1)], abs=1e-4)
    assert data["curves"]["mlp-mnist"]["methods"]["l2"]["boundary"] is None


def test_a_curve_ends_where_most_seeds_have_stopped():
    content = made.figure2(4, 10, ("mlp-mnist",))
    content["runs"] = [run for run in content["runs"] if run["method"] == "bmrs_n"]
    for run, stop in zip(content["runs"], (3, 5, 8, 10), strict=True):
        run.update(fractions=run["fractions"][:stop], accuracy=run["accuracy"][:stop])
        run["compression"] = {name: values[:stop] for name, values in run["compression"].items()}
    assert len(digest([content])["curves"]["mlp-mnist"]["methods"]["bmrs_n"]["accuracy"]) == 1 + 8


def test_the_knee_is_the_one_of_the_figures():
    from bmrs.study.plots_curves import knee as of_figures

    chance = np.random.default_rng(0)
    for _ in range(50):
        x = np.sort(chance.random(12))
        y = np.cumsum(-(chance.random(12) ** 3))
        assert knee(list(x), list(y)) == of_figures(x, y)
    assert knee([0.0, 1.0, 2.0], [3.0, 2.0, 1.0]) is None
    assert knee([0.0, None, 2.0], [3.0, 2.0, 1.0]) is None


def test_gates_are_counted_at_the_tolerance(tmp_path):
    tau = 0.5 * math.log(2 * math.pi)
    run = {"setting": "mlp-mnist", "seed": 0, "layer": ["fc1", "fc1", "fc2", "fc2"], "mean": [0.05, 0.05, 0.6, 1.0],
           "delta_f": {"bmrs_n": [-tau + 1e-3, -tau - 1e-3, -200.0, None]}}  # fmt: skip
    gates = digest([made.result("posteriors", [run], ("mlp-mnist",))])["gates"]["mlp-mnist"]
    bars = gates["histogram"]["bmrs_n"]
    assert (sum(bars["removed"]), sum(bars["kept"])) == (1, 3)
    assert bars["removed"][1] == 1  # of 25 bins, the one from 0.04 to 0.08
    assert bars["kept"][-1] == 1
    assert (gates["layers"], gates["layer"]) == (["fc1", "fc2"], [0, 0, 1, 1])
    assert gates["tolerance"]["bmrs_n"] == pytest.approx(tau, abs=1e-4)


def test_many_units_are_thinned():
    run = made.figure1(1)["runs"][0]
    run = {**run, "layer": ["fc1"] * 10_000, "mean": [0.5] * 10_000, "delta_f": {"bmrs_n": [-5.0] * 10_000}}
    gates = digest([made.result("posteriors", [run])])["gates"]["mlp-mnist"]
    assert gates["units"] == 10_000
    assert 1000 < len(gates["mean"]) <= 1500
    assert sum(gates["histogram"]["bmrs_n"]["kept"]) == 10_000


def test_correlations_are_means(study, data):
    found = data["correlations"]["mlp-cifar10"]
    tables = np.array([r["spearman"] for r in study[2]["runs"] if r["setting"] == "mlp-cifar10"])
    assert np.array(found["spearman"]) == pytest.approx(tables.mean(0), abs=1e-3)


def test_prices_and_bits(data):
    assert set(data["prices"]) == {"lenet5-mnist", "lenet5-fashion-mnist", "mlp-fashion-mnist"}
    prices = data["prices"]["lenet5-mnist"]
    assert [(c["price"], c["strength"]) for c in prices] == [
        ("layer", 1.0), ("uniform", 1.0), ("uniform", 0.5), ("params", 0.5), ("params", 0.25), ("elbo", 1.0),
    ]  # fmt: skip
    assert {c["method"] for c in prices} == {"bmrs_n"}
    assert [c["p1"] for c in data["bits"]["lenet5-cifar10"]] == [2, 4, 6, 8, 10, 12]
    assert "bmrs_u2" not in data["pruned"]["lenet5-cifar10"]
    assert "bmrs_u8" in data["pruned"]["lenet5-cifar10"]


def test_results_are_not_mixed(study, data):
    other = made.table1(2, ("mlp-mnist",))
    for run in other["runs"]:
        run["accuracy"] = 0.5
    first = digest([study[0], other])["pruned"]["mlp-mnist"]["bmrs_n"]
    assert (first["n"], first["accuracy"]) == (10, data["pruned"]["mlp-mnist"]["bmrs_n"]["accuracy"])
    assert digest([other, study[0]])["pruned"]["mlp-mnist"]["bmrs_n"]["accuracy"] == [0.5, 0]


@pytest.mark.parametrize("gates", [True, False])
def test_the_demos_result(tmp_path, gates):
    path = tmp_path / "result.json"
    path.write_text(json.dumps(made.demo(gates)))
    reader = Reader(written(report.load([path]), tmp_path))
    assert "LeNet-5, digits: 96.6 % of the parameters removed, 97.8 % test accuracy" in reader.text
    assert "the whole network reaches 98.9 % (−1.1 points). One seed" in reader.text
    assert "416,520 129,830 −68.8 %" in reader.text
    assert "149 102" in reader.text  # milliseconds of an epoch
    assert "±" not in reader.text
    assert ("Gates and evidence" in reader.text) == gates
    data = reader.data
    assert data["settings"]["lenet5-digits"]["layers"] == {"conv1": 6, "conv2": 16, "fc1": 120, "fc2": 84}
    assert data["pruned"]["lenet5-digits"]["bmrs_n"]["units"]["fc1"] == [11, None]
    if gates:
        bars = data["gates"]["lenet5-digits"]["histogram"]["bmrs_n"]
        assert (sum(bars["kept"]), sum(bars["removed"])) == (31, 195)


@pytest.mark.parametrize("make", [made.table1, made.prices, made.figure4, made.figure2, made.figure3, made.figure1])
def test_each_result_alone_and_with_one_seed(tmp_path, make):
    content = make(1)
    reader = Reader(written([content], tmp_path))
    assert "±" not in reader.text.replace("± one standard", "").replace("paper", "±paper").split("±paper")[0]
    assert reader.data["results"][0]["kind"] == content["kind"]
    Reader(written([{**content, "runs": []}], tmp_path))
    Reader(written([{**content, "settings": {}, "energy": None, "provenance": {}}], tmp_path))


def test_times_beside_the_papers(tmp_path):
    text = Reader(written([made.timing()], tmp_path)).text
    assert "whole training step" in text
    assert "2.41 → 20.02" in text
    assert "another machine" in text


def test_what_is_not_finite_is_left_out(tmp_path):
    content = made.table1(3, ("mlp-mnist",))
    for run in content["runs"]:
        if run["method"] == "snr":
            run["accuracy"] = None if run["seed"] else 0.9
        if run["method"] == "mean":
            run["accuracy"], run["compression"] = float("nan"), {"published": None, "actual": None}
    cells = Reader(written([content], tmp_path)).data["pruned"]["mlp-mnist"]
    assert cells["snr"]["accuracy"] == [0.9, None]
    assert cells["mean"]["accuracy"] is None


def test_energy_is_marked_and_counted_once(study, page, tmp_path):
    text = Reader(page).text
    assert "Pruning after training, Rank correlations, Posteriors 214 Wh 95 g measured" in text
    assert "299 Wh of energy, measured" in text  # 83.1 + 214 + 2.1
    for energy, said in (
        ({"kwh": 0.002, "co2_g": None, "how": "estimated", "note": "From CPU time."}, "2 Wh – estimated"),
        ({"kwh": None, "co2_g": None, "how": "unavailable", "note": "No counter."}, "– – unavailable"),
        (None, "– – unavailable"),
    ):
        assert said in Reader(written([{**study[2], "energy": energy}], tmp_path)).text


def test_hostile_names_stay_text(tmp_path):
    contents = made.study()
    text = json.dumps(contents[0]).replace('"snr"', json.dumps(HOSTILE)).replace('"fc1"', json.dumps(HOSTILE))
    contents[0] = json.loads(text.replace("mlp-mnist", json.dumps(HOSTILE)[1:-1]))
    contents[0]["provenance"] = {HOSTILE: HOSTILE, "command": HOSTILE, "versions": {HOSTILE: [HOSTILE]}}
    contents[0]["energy"] = {"kwh": 1, "co2_g": 1, "how": HOSTILE, "note": HOSTILE}
    contents[0]["settings"][HOSTILE]["network"] = HOSTILE
    contents[6]["runs"][0]["mode"] = contents[6]["runs"][0]["method"] = HOSTILE
    page = written(contents, tmp_path)
    assert "</script><b" not in page
    assert "<b onclick" not in page
    reader = Reader(page)
    assert len(reader.scripts) == 2
    assert not [a for _, a in reader.tags if any(name.startswith("on") for name in a)]
    assert HOSTILE in reader.data["pruned"]
    assert HOSTILE in reader.text


def test_embedded_json_is_the_same_json():
    value = {"a": [HOSTILE, "\u2028\u2029", 1.5, None], "b": float("inf")}
    text = embeddable(value)
    assert not set("<>&\u2028\u2029") & set(text)
    assert json.loads(text) == {**value, "b": None}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "does not exist"),
        ("not json", "is not JSON"),
        ("[1]", "is not a result"),
        ('{"kind": "cake", "runs": []}', "must be one of continuous"),
        ('{"hello": 1}', "must be one of continuous"),
        ('{"kind": "continuous"}', "'runs' must be a list"),
        ('{"kind": "continuous", "runs": [3]}', "run 0"),
        ('{"kind": "continuous", "runs": [{"setting": "a"}]}', "has no 'method'"),
        ('{"kind": "correlations", "runs": [{"setting": "a", "methods": 3, "spearman": []}]}', "must be a list"),
        ('{"kind": "timing", "runs": [], "settings": 3}', "'settings' must be an object"),
        ('{"before": {}, "after": {}}', "'units' is missing"),
    ],
)
def test_what_is_not_a_result_is_refused_in_one_sentence(tmp_path, text, said):
    path = tmp_path / "x.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match=said) as wrong:
        report.load([path])
    assert str(path) in str(wrong.value)
    assert "\n" not in str(wrong.value)
    assert str(wrong.value).endswith(".")


def test_nothing_to_write_is_refused(tmp_path):
    for contents in ([], made.demo()):
        with pytest.raises(ValueError, match="list of at least one result"):
            report.write(contents, tmp_path / "x.html")
    with pytest.raises(ValueError, match="is a folder"):
        report.load(tmp_path)


def test_spreads_and_seeds_are_at_the_first_glance(page, study):
    glance = page.split('class="glance"')[1].split("</table>")[0]
    runs = [r for r in study[0]["runs"] if (r["setting"], r["method"]) == ("mlp-mnist", "bmrs_n")]
    for values in ([r["compression"]["actual"] for r in runs], [r["accuracy"] for r in runs]):
        assert f"± {100 * np.std(values, ddof=1):.1f}<" in glance
    one = whole_page(digest([made.table1(1)]))
    assert "±" not in one.split('class="glance"')[1].split("</table>")[0]


def test_prices_stand_beside_the_whole_network_and_the_paper(page, study):
    table = page.split('role="region" aria-label="Prices"')[1].split("</table>")[0]
    whole, paper, layer, *_ = re.findall(r'<tr><th scope="row">(.*?)</tr>', table)
    assert whole.startswith("whole network")
    assert paper.startswith("paper's BMRS_N")
    assert "<td>86.9 ± 1.1</td><td>95.6 ± 0.9</td>" in paper  # LeNet-5 on MNIST, as published
    assert "layer" in layer
    alone = made.prices(2)
    alone["settings"] = {key: {**entry, "data": "other"} for key, entry in alone["settings"].items()}
    assert "whole network" not in page_text(alone)
    assert "paper" not in page_text(alone)


def page_text(content) -> str:
    return Reader(whole_page(digest([content]))).text


def test_what_was_not_run_is_said(page):
    assert "Not in these results" not in Reader(page).text
    text = page_text(made.table1(1))
    assert "Latency and memory were not measured here." in text
    assert (
        "Not in these results: curves of pruning after training, posteriors of the gates, rank correlations, "
        "a comparison of prices, times and memory." in text
    )


def test_the_price_of_the_table_is_named():
    content = made.table1(1)
    for run in content["runs"]:
        run.update(price="uniform", strength=0.5)
    assert "Price: uniform, s = 0.5." in page_text(content)
    assert "Price: layer." in page_text(made.table1(1))


@pytest.mark.parametrize("criterion", [bmrs.BMRS_N(tolerance=2.0), bmrs.SNR(3.0)])
def test_a_loop_of_ones_own(tmp_path, criterion):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 5), nn.ReLU(), nn.Linear(5, 2))
    pruner = bmrs.Pruner(model, torch.randn(4, 6), criterion=criterion)
    recorder = report.Recorder(pruner, torch.randn(1, 6), network="my net", data="my data", batch=32)
    parameters, multiply_adds = bmrs.cost.parameters, bmrs.cost.multiply_adds
    whole = 6 * 9 + 9 + 9 * 5 + 5 + 5 * 2 + 2
    recorder.prune(fraction=0.0)
    with torch.no_grad():  # six gates forgotten, the others far from it
        pruner.bank.mu.fill_(-0.1)
        pruner.bank.log_sigma.fill_(-4.0)
        pruner.bank.mu[:6], pruner.bank.log_sigma[:6] = -10.0, 4.0
    assert recorder.prune().removed == 6
    small = pruner.finish()
    content = json.loads(json.dumps(recorder.result(accuracy=0.75), allow_nan=False))
    assert content["before"] == {"accuracy": None, "parameters": whole, "multiply_adds": 6 * 9 + 9 * 5 + 5 * 2}
    assert content["after"]["parameters"] == parameters(small)
    assert content["after"]["multiply_adds"] == multiply_adds(small, torch.randn(1, 6))
    assert [pair["after"] for pair in content["units"].values()] == [3, 5]
    assert content["gates"]["removed_at"] == [2] * 6 + [0] * 8
    assert content["history"] == [{"epoch": 1, "units": 14}, {"epoch": 2, "units": 8}]
    reader = Reader(written([content], tmp_path))
    assert "my net, my data" in reader.text
    assert "75.0 % test accuracy" in reader.text
    assert "batch" in reader.text
    gates = reader.data["gates"]["my net-my data"]
    assert gates["removed_by"] == ("bmrs_n" if isinstance(criterion, bmrs.BMRS_N) else "snr")
    assert gates["tolerance"]["bmrs_n"] == (
        2.0 if isinstance(criterion, bmrs.BMRS_N) else pytest.approx(0.9189, abs=1e-4)
    )
    with pytest.raises(ValueError, match="divide percentages by 100"):
        recorder.result(accuracy=75)


def test_the_history_of_a_demo_is_read_from_its_gates():
    content = {**made.demo(), "kind": "demo"}
    del content["history"]
    history = digest([content])["pruned"]["lenet5-digits"]["bmrs_n"]["history"]
    gone = content["gates"]["removed_at"]
    assert len(history) == 40
    assert history == [[e, sum(not 0 < at <= e for at in gone)] for e in range(1, 41)]
