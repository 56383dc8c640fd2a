"""What the site adds to its pages, so that they read the same on a code host.

- A link to a file of the repository leads to a page with that file.
- ``<!-- results: table1 -->`` is replaced by what ``results`` holds under that name; without it, by how to make it,
  which ``<!-- results: resnet50 by bmrs study table2 ... -->`` says where the command has another name.
- Formulas, $...$, become MathML, which browsers show by themselves. Wide pictures scroll on a phone.
- A pattern in the navigation stands for the files it matches; a page that is not there has no entry.
"""

import html
import re
from pathlib import Path, PurePosixPath
from typing import Any

from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"(!?\[[^\]]*\]\()([^)#\s]+)(#[^)\s]*)?\)")
RESULT = re.compile(r"<!-- results: ([\w-]+)(?: by (.+?))? -->")
FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)
PICTURES = (".png", ".svg")
LANGUAGES = {".py": "python", ".cff": "yaml", ".toml": "toml", ".json": "json"}


# --- the navigation ---------------------------------------------------------------------------------------------------


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    config.nav = _present(config.nav)
    return config


def _present(entries: list[Any]) -> list[Any]:
    kept: list[Any] = []
    for entry in entries:
        ((title, target),) = entry.items()
        if isinstance(target, list):
            kept.append({title: _present(target)})
        elif "*" in target:
            found = sorted(ROOT.glob(target))
            kept.append({title: [{_title(path): page_of(path)} for path in found]})
        elif (ROOT / "docs" / target).is_file() or (ROOT / target).is_file():
            kept.append(entry)
    return kept


def _title(path: Path) -> str:
    return path.stem.replace("_cuda", ", on a GPU").replace("_", " ").capitalize().replace("gpu", "GPU")


def page_of(path: Path) -> str:
    """The page that shows a file of the repository."""
    name = path.relative_to(ROOT).as_posix()
    return "index.md" if name == "README.md" else name if name.endswith(".md") else f"{name}.md"


def is_page(path: Path) -> bool:
    """Whether a file is shown as a page; pictures and the like are copied."""
    return path.suffix == ".md" or path.suffix in LANGUAGES


# --- files of the repository as pages ---------------------------------------------------------------------------------


def on_files(files: Files, config: MkDocsConfig) -> Files:
    shown = {ROOT / name for name in _named(config.nav) if (ROOT / name).is_file()}
    unread = [ROOT / "docs" / file.src_uri for file in files.documentation_pages()] + list(shown)
    while unread:
        found = _linked(unread.pop()) - shown
        shown |= found
        unread += found
    for path in sorted(shown | {path for path in (ROOT / "results").rglob("*") if path.suffix in PICTURES}):
        if not is_page(path):
            files.append(File.generated(config, path.relative_to(ROOT).as_posix(), abs_src_path=str(path)))
        elif page_of(path) not in files.src_uris:
            content, level = _content(path), InclusionLevel.NOT_IN_NAV  # or in it: it need not be
            files.append(File.generated(config, page_of(path), content=content, inclusion=level))
    return files


def _named(nav: list[Any]) -> list[str]:
    """What the navigation names, and what it may be the page of."""
    named: list[str] = []
    for entry in nav:
        for target in entry.values():
            named += _named(target) if isinstance(target, list) else [target, target.removesuffix(".md")]
    return named


def _linked(path: Path) -> set[Path]:
    """The files outside docs that a page links to."""
    if path.suffix != ".md":
        return set()
    targets = [_target(path, match[2]) for match in LINK.finditer(path.read_text())]
    return {target for target in targets if target is not None and not target.is_relative_to(ROOT / "docs")}


def _target(path: Path, link: str) -> Path | None:
    """The file of the repository that a link leads to."""
    if re.match(r"[a-z]+:", link):
        return None
    target = (path.parent / link).resolve()
    return target if target.is_file() and target.is_relative_to(ROOT) else None


def _content(path: Path) -> str:
    text = path.read_text()
    if path.suffix == ".md":
        return text
    name = path.relative_to(ROOT).as_posix()
    return f"# {path.name}\n\n`{name}`\n\n````{LANGUAGES.get(path.suffix, 'text')}\n{text.rstrip()}\n````\n"


# --- the text of a page -----------------------------------------------------------------------------------------------


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    if page.is_homepage:
        page.meta.setdefault("hide", ["navigation", "toc"])
    own = ROOT / "docs" / page.file.src_uri
    if not own.is_file():
        own = ROOT / page.file.src_uri  # a file of the repository
    if own.is_file():
        markdown = LINK.sub(lambda match: _on_the_site(match, own, page.file.src_uri), markdown)
    return RESULT.sub(lambda match: _results(match[1], page.file.src_uri, match[2]), markdown)


def _on_the_site(match: re.Match[str], own: Path, uri: str) -> str:
    target = _target(own, match[2])
    if target is None:
        return match[0]
    if target.is_relative_to(ROOT / "docs"):
        place = target.relative_to(ROOT / "docs").as_posix()
    elif not is_page(target):
        place = target.relative_to(ROOT).as_posix()
    else:
        place = page_of(target)
    return f"{match[1]}{_relative(place, uri)}{match[3] or ''})"


def _relative(place: str, uri: str) -> str:
    return "../" * (len(PurePosixPath(uri).parts) - 1) + place


def _results(name: str, uri: str, command: str | None = None) -> str:
    """Tables and pictures of that name, headings two levels down."""
    parts = []
    for path in sorted((ROOT / "results").rglob(f"{name}.*")):
        place = path.relative_to(ROOT).as_posix()
        if path.suffix == ".md":
            text = re.sub(r"^(#+ )", r"##\1", path.read_text(), flags=re.MULTILINE)
            parts.append(LINK.sub(lambda match, own=path: _on_the_site(match, own, uri), text))
        elif path.suffix in PICTURES:
            parts.append(f"![{_title(path)}]({_relative(place, uri)})")
    return "\n\n".join(parts) or f"*Not computed yet:* `{command or f'bmrs study {name}'}` *makes it.*"


def on_page_content(html_: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    html_ = re.sub(r"<p>(<img [^>]+>)</p>", r'<div class="picture">\1</div>', html_)
    return FORMULA.sub(lambda match: mathml(html.unescape(match[2]), match[1] == "div"), html_)


def mathml(formula: str, display: bool) -> str:
    """A formula as the browser's own markup; wide ones scroll by themselves."""
    made: str = convert(formula.strip(), display="block" if display else "inline")
    return f'<div class="formula">{made}</div>' if display else made
