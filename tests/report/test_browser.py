"""The page in a real browser. Skipped where there is no Chromium."""

import json
import re
import shutil

import numpy as np
import pytest

from bmrs import report
from tests.report import made
from tests.report.test_page import HOSTILE

playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
ARGUMENTS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update",
]  # fmt: skip


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def study():
    return [made.table1(3), made.figure2(3, 60), made.figure3(2), made.figure1(2), made.prices(2), made.figure4(2),
            made.timing()]  # fmt: skip


@pytest.fixture(scope="module")
def file(study, tmp_path_factory):
    return report.write(study, tmp_path_factory.mktemp("page") / "report.html")


@pytest.fixture
def opened(browser):
    """Opens a file; afterwards checks that it said nothing on the console and asked for nothing but itself."""
    contexts, said, asked = [], [], []

    def go(path, width=1280, **options):
        context = browser.new_context(viewport={"width": width, "height": 900}, **options)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(10_000)
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(path.as_uri())
        return page

    yield go
    for context in contexts:
        context.close()
    assert said == []
    assert [url for url in asked if not re.fullmatch(r"file:.*\.html|blob:.*", url)] == []


def tip(page, chart):
    return re.sub(r"\s+", " ", page.inner_text(f"#{chart} .tip"))


def test_another_setting_is_another_chart(opened, file):
    page = opened(file)
    charts = ["chart-curves", "chart-history", "chart-widths", "chart-means", "chart-evidence", "correlations"]

    def drawn():
        return [page.inner_html(f"#{name}") for name in charts]

    before = drawn()
    assert all("<svg" in one or "<table" in one for one in before)
    page.select_option("#setting", "lenet5-cifar10")
    after = drawn()
    assert all(a != b for a, b in zip(before, after, strict=True))
    assert page.inner_text("#curves .which") == "LeNet-5, CIFAR-10"
    assert "conv1" in page.inner_text("#chart-widths")
    assert "not run for LeNet-5, CIFAR-10" in page.inner_text("#prices .which")
    assert "not run" not in page.inner_text("#bits .which")
    page.select_option("#setting", "mlp-mnist")
    unnumbered = [re.sub(r"(clip|hatch)-\d+", "", one) for one in drawn()]
    assert unnumbered == [re.sub(r"(clip|hatch)-\d+", "", one) for one in before]


def test_methods_counting_and_close_up(opened, file):
    page = opened(file)
    chart = page.locator("#chart-curves")
    assert page.locator("#legend-curves [aria-pressed=false]").all_inner_texts() == ["Gradient"]
    points = int(chart.get_attribute("data-points"))
    page.click("#legend-curves >> text=L2")
    assert int(chart.get_attribute("data-points")) == points - 61
    page.click("#legend-curves >> text=L2")
    assert int(chart.get_attribute("data-points")) == points
    published = page.inner_text("#results td >> nth=3")
    page.check("input[value=actual]")
    assert "actual counting" in chart.inner_html()
    assert page.inner_text("#results td >> nth=3") != published
    before = chart.inner_html()
    page.check("#close")
    assert chart.inner_html() != before
    page.select_option("#method-gates", "bmrs_u8")
    assert "ΔF ≥ 0" in page.inner_html("#chart-evidence")


def test_the_tip_tells_the_right_number(opened, file, study):
    page = opened(file)
    page.select_option("#setting", "lenet5-mnist")
    for name in ("L2", "E[θ]", "SNR", "BMRS_U-8", "BMRS_U-4"):  # only BMRS_N is left
        page.click(f"#legend-curves button:has-text('{name}')")
    runs = [r for r in study[1]["runs"] if r["setting"] == "lenet5-mnist" and r["method"] == "bmrs_n"]
    accuracy = 100 * np.array([r["accuracy"] for r in runs])
    removed = 100 * np.array([r["compression"]["published"] for r in runs]).mean(0)

    def expected(i):
        return (f"BMRS_N parameters removed {removed[i]:.1f} % units removed {100 * runs[0]['fractions'][i]:.1f} % "
                f"accuracy {accuracy.mean(0)[i]:.1f} % ± {accuracy.std(0, ddof=1)[i]:.1f} seeds 3")  # fmt: skip

    page.focus("#chart-curves")
    for _ in range(42):  # the first shows the whole network
        page.keyboard.press("ArrowRight")
    assert tip(page, "chart-curves") == expected(40)
    # The same place under the pointer, and under a finger.
    ring = page.locator("#chart-curves .ring").bounding_box()
    place = ring["x"] + ring["width"] / 2, ring["y"] + ring["height"] / 2
    page.keyboard.press("Escape")
    assert page.locator("#chart-curves .tip").is_hidden()
    page.mouse.move(*place)
    assert tip(page, "chart-curves") == expected(40)
    page.mouse.move(5, 5)
    assert page.locator("#chart-curves .tip").is_hidden()
    page.focus("#chart-curves")
    page.keyboard.press("End")
    stops = 100 * np.array([r["boundary"]["published"] for r in runs])
    assert tip(page, "chart-curves").startswith("BMRS_N stops here")
    assert f"parameters removed {stops.mean():.1f} ± {stops.std(ddof=1):.1f} %" in tip(page, "chart-curves")


def test_a_tap_shows_numbers(opened, file):
    page = opened(file, 390, has_touch=True, is_mobile=True)
    page.locator("#chart-widths").scroll_into_view_if_needed()
    page.locator("#chart-widths .kept").first.tap()
    assert tip(page, "chart-widths").startswith("fc1 before 100 after ")


@pytest.mark.parametrize("width", [1280, 390])
def test_a_tip_is_never_over_its_point(opened, file, width):
    page = opened(file, width, reduced_motion="reduce")  # a page that glides moves between two looks
    page.focus("#chart-curves")
    for step in range(1, 60):
        page.keyboard.press("ArrowDown" if step % 9 == 0 else "ArrowRight")
        ring, said = (page.locator(f"#chart-curves .{part}").bounding_box() for part in ("ring", "tip"))
        x, y = ring["x"] + ring["width"] / 2, ring["y"] + ring["height"] / 2
        assert not (said["x"] < x < said["x"] + said["width"] and said["y"] < y < said["y"] + said["height"])
        assert said["x"] >= 0
        assert said["x"] + said["width"] <= width


def test_nothing_sticks_out_on_a_phone(opened, file, tmp_path):
    for path in (file, report.write([made.demo()], tmp_path / "demo.html")):
        page = opened(path, 390, is_mobile=True, has_touch=True)
        for part in page.locator("summary").all():
            part.click()
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        for chart in page.locator(".chart").all():
            assert chart.bounding_box()["x"] + chart.bounding_box()["width"] <= 390


def test_dark_and_light(opened, file):
    def colours(scheme):
        page = opened(file, color_scheme=scheme)
        style = "(e) => [getComputedStyle(e).backgroundColor, getComputedStyle(e).color].map((c) => c.match(/\\d+/g))"
        return [sum(map(int, rgb[:3])) for rgb in page.eval_on_selector("body", style)]

    (ground, ink), (night, light) = colours("light"), colours("dark")
    assert ground > 700 > 150 > ink
    assert night < 100 < 650 < light


def test_print_opens_what_is_folded_and_is_never_dark(opened, file):
    page = opened(file, color_scheme="dark")
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.locator("details:not([open])").count() == 0
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert page.locator("details[open]").count() == 0
    page.emulate_media(media="print")
    assert page.eval_on_selector("body", "(e) => getComputedStyle(e).backgroundColor") == "rgb(255, 255, 255)"
    assert page.locator(".controls").is_hidden()


def test_the_data_can_be_downloaded(opened, file, tmp_path):
    page = opened(file)
    with page.expect_download() as waiting:
        page.click("#download")
    waiting.value.save_as(tmp_path / "data.json")
    data = json.loads((tmp_path / "data.json").read_text())
    assert list(data["settings"]) == list(made.LAYERS)
    assert data == page.evaluate("JSON.parse(document.getElementById('data').textContent)")


def test_without_javascript_the_tables_are_there(opened, file):
    page = opened(file, java_script_enabled=False)
    assert page.locator("noscript").is_visible()
    assert page.locator(".results").count() == 2
    assert page.locator(".chart").first.is_hidden()
    assert page.locator("#download").is_hidden()


@pytest.mark.parametrize("name", [HOSTILE, "__proto__"])
def test_hostile_names_do_nothing(opened, tmp_path, name):
    contents = [made.table1(2), made.figure2(2, 10), made.figure3(2), made.figure1(1), made.prices(2)]
    text = json.dumps(contents)
    for word in ("mlp-mnist", "snr", "fc2"):
        text = text.replace(f'"{word}"', json.dumps(name))
    page = opened(report.write(json.loads(text), tmp_path / "hostile.html"))
    page.select_option("#setting", name)
    for select in ("method-widths", "method-gates"):
        for value in page.eval_on_selector_all(f"#{select} option", "(all) => all.map((one) => one.value)"):
            page.select_option(f"#{select}", value)
    assert page.locator("#chart-curves svg").count() == 1
    assert name[:17] in page.inner_text("#chart-widths")
    assert page.locator("b[onclick]").count() == 0
    page.focus("#chart-curves")
    for _ in range(4):
        page.keyboard.press("ArrowDown")
        assert page.locator("#chart-curves .tip").is_visible()


def test_every_kind_alone_draws(opened, tmp_path):
    alone = (made.table1(1), made.prices(1), made.figure4(1), made.figure2(1, 5), made.figure3(1), made.figure1(1),
             made.timing(), made.demo(False), {**made.figure2(1), "runs": []})  # fmt: skip
    page = opened(report.write([made.demo()], tmp_path / "demo.html"))
    for i, content in enumerate(alone):
        page.goto(report.write([content], tmp_path / f"{i}.html").as_uri())
        assert page.evaluate("document.documentElement.classList.contains('js')")


def test_a_setting_called_like_a_builtin_has_only_its_own_results(opened, tmp_path):
    pruned = json.loads(json.dumps(made.table1(1, ("mlp-mnist",))).replace("mlp-mnist", "constructor"))
    page = opened(report.write([pruned, made.figure2(1, 5, ("mlp-mnist",)), made.figure1(1)], tmp_path / "page.html"))
    page.select_option("#setting", "constructor")
    assert page.inner_text("#chart-curves") == "Not run for this setting."
    assert page.inner_text("#chart-evidence") == "Not run for this setting."
    assert page.locator("#chart-history svg").count() == 1


LABELS = """(chart) => {
  const texts = [...chart.querySelectorAll(".axes text:not(.name)")].map((one) => one.getBoundingClientRect());
  const frame = chart.getBoundingClientRect();
  const out = texts.filter((box) => box.left < frame.left - 1 || box.right > frame.right + 1).length;
  const over = texts.filter((a, i) => texts.some((b, j) => i < j && a.left < b.right && b.left < a.right
    && a.top + 3 < b.bottom && b.top + 3 < a.bottom)).length;
  return [chart.id, texts.length, out, over];
}"""


@pytest.mark.parametrize("width", [1280, 390])
def test_no_label_of_an_axis_is_cut_off_or_hidden_by_another(opened, tmp_path, width):
    # Long labels: the evidence that large networks find, and accuracies so alike that they need a decimal.
    gates, bits = made.figure1(1), json.loads(json.dumps(made.figure4(2)).replace("cifar10", "other"))
    for run in gates["runs"]:
        run["delta_f"]["bmrs_n"][0] = -3.2e7
    for run in bits["runs"]:
        run["accuracy"] = 0.665
    contents = [bits, made.table1(2), made.figure2(2, 20), gates, made.prices(2)]
    page = opened(report.write(contents, tmp_path / "page.html"), width)
    for setting in ("mlp-mnist", "lenet5-mnist", "mlp-fashion-mnist"):
        page.select_option("#setting", setting)
        found = page.eval_on_selector_all(".chart", f"(charts) => charts.map({LABELS})")
        assert len(found) == 8
        assert [(name, out, over) for name, texts, out, over in found if not texts or out or over] == []
    assert "−10⁷" in page.text_content("#chart-evidence")
    assert "66.5 %" in page.text_content("#chart-bits-accuracy")


def test_every_chart_and_control_is_reached_by_keyboard(opened, file):
    page = opened(file)
    reached = set()
    for _ in range(80):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.id"))
    charts = page.eval_on_selector_all(".chart", "(all) => all.map((one) => one.id)")
    assert reached >= {*charts, "setting", "close", "method-widths", "method-gates", "download"}
    page.focus("#chart-prices")
    page.keyboard.press("ArrowRight")
    assert page.locator("#chart-prices .tip").is_visible()


def test_the_papers_values_are_in_the_charts(opened, file):
    page = opened(file)
    page.select_option("#setting", "lenet5-mnist")
    assert page.locator("#legend-prices").inner_text().split("\n")[-2:] == [
        "paper's BMRS_N, its own counting", "whole network"
    ]  # fmt: skip
    page.focus("#chart-prices")
    tips = set()
    for _ in range(8):
        page.keyboard.press("ArrowRight")
        tips.add(tip(page, "chart-prices"))
    assert "paper's BMRS_N parameters removed, its counting 86.9 ± 1.1 % accuracy 95.6 ± 0.9 %" in tips
    page.focus("#chart-bits-removed")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowDown")
    assert tip(page, "chart-bits-removed").startswith("paper, p₁ = 4 parameters removed (published counting) 68.1 ± ")
    page.check("input[value=actual]")  # the paper has none of it
    assert page.locator("#legend-bits-removed").inner_text() == "BMRS_U"


def test_a_curve_of_two_points_and_no_curve_at_all(opened, tmp_path):
    content = made.figure2(1, 1, ("mlp-mnist",))
    content["runs"] = [{**run, "whole": None} for run in content["runs"] if run["method"] in ("bmrs_n", "l2")]
    page = opened(report.write([content], tmp_path / "page.html"))
    assert int(page.locator("#chart-curves").get_attribute("data-points")) >= 2
    for button in page.locator("#legend-curves button").all():
        button.click()
    assert page.inner_text("#chart-curves") == "Choose a method above."
    page.locator("#legend-curves button").first.click()
    assert page.locator("#chart-curves svg").count() == 1


def test_the_evidence_of_another_criterions_run_is_a_second_opinion(opened, tmp_path):
    content = made.demo()
    content["provenance"]["criterion"] = "SNR(threshold=1)"
    page = opened(report.write([content], tmp_path / "snr.html"))
    assert "BMRS_N would remove: ΔF ≥ −τ" in page.text_content("#chart-evidence")
    page = opened(report.write([made.demo()], tmp_path / "n.html"))
    assert "removed: ΔF ≥ −τ" in page.text_content("#chart-evidence")
    assert "would" not in page.text_content("#chart-evidence")


def test_a_phone_shows_whole_what_matters_most(opened, file):
    page = opened(file, 390, is_mobile=True, has_touch=True)
    for selector in (
        ".glance th:nth-child(5)",
        ".results tbody tr:first-child td:nth-child(3)",
        "#correlations td:last-child",
    ):
        box = page.locator(selector).first.bounding_box()
        assert box["x"] + box["width"] <= 390 - 18, selector
