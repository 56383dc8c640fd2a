"""The report: one HTML file that shows a study or a single run, and needs no network to be read.

``bmrs study`` and ``bmrs demo`` write one by themselves. From their JSON files, one or several on one page::

    bmrs.report.write(bmrs.report.load(["runs/demo/result.json"]), "report.html")

and on the command line ``bmrs report runs/demo/result.json``. A training loop of one's own is noted by a
:class:`Recorder`, which stands between the loop and its Pruner::

    pruner = bmrs.Pruner(model, example, optimizer)
    recorder = bmrs.report.Recorder(pruner, example, network="ResNet-18", data="my images", epochs=40)
    for epoch in range(40):
        ...                                                        # the loop as it was
        recorder.prune()                                           # instead of pruner.prune()
    model = pruner.finish()
    bmrs.report.write([recorder.result(accuracy=0.94, whole_accuracy=0.95)], "report.html")

Inside, ``reading`` checks the files, ``digest`` boils them down to what the page shows, ``tables`` writes what can be
read without JavaScript, and ``page`` puts it together with the style sheet and the scripts beside it.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bmrs.report.reading import load
from bmrs.report.recording import Recorder

__all__ = ["Recorder", "load", "write"]


def write(contents: Sequence[Mapping[str, Any]], path: str | Path) -> Path:
    """One HTML file from one or several results, as :func:`load` or :meth:`Recorder.result` gives them; returns where.

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
