"""The report: one HTML file that shows a study or a single run, and needs no network to be read.

:func:`load` reads the JSON files, ``digest`` boils them down to what the page shows, ``tables`` writes what can be read
without JavaScript, and ``page`` puts it together with the style sheet and the scripts beside it.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bmrs.report.reading import load

__all__ = ["load", "write"]


def write(contents: Sequence[Mapping[str, Any]], path: str | Path) -> Path:
    """One HTML file from one or several results, as :func:`load` gives them; returns where it is.

    Where two results hold the same setting and method, the first is shown.
    """
    from bmrs.report.digest import digest
    from bmrs.report.page import page
    from bmrs.report.reading import checked

    if isinstance(contents, Mapping) or not contents:
        raise ValueError("contents must be a list of at least one result: pass bmrs.report.load([...]).")
    path = Path(path)
    text = page(digest([checked(content, f"contents[{i}]") for i, content in enumerate(contents)]))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path
