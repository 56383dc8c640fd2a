"""``bmrs report``."""

import json
from pathlib import Path
from typing import Annotated

import typer

from bmrs import report as pages
from bmrs.commands import options
from bmrs.commands.errors import guard


def report(
    results: Annotated[
        list[Path], typer.Argument(help="JSON results of bmrs study, bmrs train or bmrs demo, for one page.")
    ],
    out: Annotated[Path, typer.Option(help="The HTML file to write.")] = Path("report.html"),
    as_json: options.AsJson = False,
) -> None:
    """Show results on one page: a single HTML file that needs no network to be read.

    Where two results hold the same setting and method, the first is shown.

    Example:  [bold]bmrs report runs/demo/result.json --out demo.html[/bold]
    """
    with guard():
        contents = pages.load(results)
        try:
            page = pages.write(contents, out)
        except OSError as wrong:
            raise ValueError(
                f"--out names a file that cannot be written, {out} ({wrong.strerror}): choose another."
            ) from wrong
        print(json.dumps({"report": str(page)}) if as_json else page)
