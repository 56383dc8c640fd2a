"""The documentation builds without a warning, shows everything there is, and asks no other host for anything."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

import bmrs

pytest.importorskip("mkdocs", reason="needs pip install 'bmrs[docs]'")
ROOT = Path(__file__).parent.parent
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def load(path):
    spec = importlib.util.spec_from_file_location(f"docs_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    made = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder],
        cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True,
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site):
    return {path.relative_to(site).as_posix(): path.read_text() for path in site.rglob("*.html")}


def test_every_page_result_and_example_is_there(pages):
    written = {f.relative_to(ROOT / "docs").with_suffix(".html").as_posix() for f in (ROOT / "docs").rglob("*.md")}
    results = {f.relative_to(ROOT).with_suffix(".html").as_posix() for f in (ROOT / "results").rglob("*.md")}
    examples = {f"examples/{f.name}.html" for f in (ROOT / "examples").glob("*.py")}
    assert written | results | examples <= set(pages)
    for page in written | results | examples:
        if page != "index.html":
            assert f'href="{page}"' in pages["index.html"], f"{page} is not in the navigation"


class Fetched(HTMLParser):
    """What a browser fetches by itself to show a page."""

    def __init__(self, text):
        super().__init__()
        self.found = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.found += [value for name, value in attrs if value and (
            name in ("srcset", "data", "poster") or (name == "src") or (name == "href" and tag == "link"))]  # fmt: skip


def test_nothing_is_fetched_from_another_host(site, pages):
    fetched = [address for text in pages.values() for address in Fetched(text).found]
    fetched += [address for css in site.rglob("*.css") for address in re.findall(r"url\(([^)]+)\)", css.read_text())]
    assert len(fetched) > len(pages)
    foreign = [address for address in fetched if re.match(r"['\"]?(\w+:)?//", address) and "data:" not in address]
    assert not foreign


def test_formulas_are_the_browser_s_own(pages):
    assert pages["mathematics.html"].count("<math") >= 3
    assert not any("arithmatex" in text or re.search(r"\$\$", text) for text in pages.values())


def test_the_reference_has_the_whole_public_interface(pages):
    text = "".join(page for name, page in pages.items() if name.startswith("reference/"))
    shown = set(re.findall(r'id="(bmrs[\w.]*)"', text))
    missing = {f"bmrs.{name}" for name in bmrs.__all__ if not name.startswith("__")} - shown
    assert not missing
    for method in ("Pruner.prune", "Structure.verify", "TruncatedLogNormal.kl", "evidence.spike", "report.Recorder"):
        assert f"bmrs.{method}" in shown
    assert "Remove units, by their present numbers" in text  # the function, and not the module of its name


def test_docstrings_read_as_prose(pages):
    for name, text in pages.items():
        if name.startswith("reference/"):
            assert not re.search(r":(class|func|meth|mod):", text), name
            assert "<blockquote>" not in text, name  # what an example becomes that is not marked as code


def test_an_example_in_a_docstring_becomes_a_block():
    markdown = load(ROOT / "docs" / "docstrings.py").markdown
    text = "Text of :class:`~bmrs.Pruner`::\n\n    code()\n\n>>> f(1)  # doctest: +SKIP\n2\n>>> g()\n\nMore."
    assert markdown(text) == ("Text of `bmrs.Pruner`:\n\n    code()\n\n```pycon\n>>> f(1)\n2\n>>> g()\n```\n\nMore.")


def test_results_are_shown_once_they_are_there(tmp_path, monkeypatch):
    hooks = load(ROOT / "docs" / "hooks.py")
    monkeypatch.setattr(hooks, "ROOT", tmp_path)
    marked = "before\n<!-- results: table1 -->\nafter"

    def shown():
        return hooks.RESULT.sub(lambda match: hooks._results(match[1], "study.md"), marked)

    assert "bmrs study table1" in shown()
    (tmp_path / "results" / "study").mkdir(parents=True)
    (tmp_path / "results" / "study" / "table1.md").write_text("# Table\n\n| a |\n|---|\n\n[b](../b.pdf)")
    for name in ("table1.png", "b.pdf"):
        (tmp_path / "results" / name).touch()
    table = "### Table\n\n| a |\n|---|\n\n[b](results/b.pdf)"
    assert shown() == f"before\n{table}\n\n![Table1](results/table1.png)\nafter"


def test_every_picture_is_made_by_a_command_and_shown():
    pytest.importorskip("matplotlib")
    text = "".join(page.read_text() for page in (ROOT / "docs").rglob("*.md"))
    here = {path.name for path in (ROOT / "docs" / "images").iterdir()}
    figures = load(ROOT / "docs" / "figures.py")
    assert here == {*figures.FIGURES, "demo.png"}
    assert all(figures.FIGURES[file]().axes for file in ("gate.svg", "evidence.svg"))  # those without a training
    assert all(f"(images/{file})" in text for file in here)


@pytest.fixture
def browser():
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")
    if CHROMIUM is None:
        pytest.skip("needs Chromium")
    with playwright.sync_playwright() as driver:
        arguments = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
        chromium = driver.chromium.launch(executable_path=CHROMIUM, args=arguments)
        yield chromium
        chromium.close()


def test_in_a_browser(site, pages, browser):
    """From a folder: pages fit a phone and a desk, search finds things, and no other host is asked for anything."""
    page = browser.new_page()
    asked, said, wide = [], [], []
    page.on("request", lambda request: asked.append(request.url))
    page.on("pageerror", lambda error: said.append(str(error)))
    for width in (390, 1280):
        page.set_viewport_size({"width": width, "height": 800})
        for name in sorted(pages):
            if name.split("/")[0] not in ("results", "examples", "src", "404.html"):
                page.goto((site / name).as_uri())
                if page.evaluate("document.documentElement.scrollWidth > window.innerWidth"):
                    wide.append((name, width))
    page.goto((site / "index.html").as_uri())
    page.keyboard.press("f")
    page.keyboard.type("tolerance")
    page.wait_for_selector("a[href*='mathematics.html']:has(mark)", timeout=20_000)
    assert not wide
    assert not said
    assert asked
    assert not [url for url in asked if not url.startswith(("file:", "data:", "blob:", "about:"))]
