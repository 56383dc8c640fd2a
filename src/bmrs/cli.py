"""The command line: ``bmrs demo | inspect | train | prune | bench | report | study``."""

import re
import sys
from inspect import cleandoc
from typing import Annotated

try:
    import typer

    import bmrs
    from bmrs.commands.bench import bench
    from bmrs.commands.demo import demo
    from bmrs.commands.inspect import inspect
    from bmrs.commands.prune import prune
    from bmrs.commands.report import report
    from bmrs.commands.train import train
    from bmrs.study.commands import app as study
except ImportError as missing:
    sys.exit(f"bmrs: the command line needs '{missing.name}': install it with  pip install 'bmrs[demo]'")

_HELP = """Make neural networks smaller and faster without tuning a threshold.

Exit codes: 0 done; 1 failed while running; 2 bad input, nothing was done; 130 interrupted. What went wrong is one
sentence on stderr; BMRS_DEBUG=1 shows the traceback too.

Example:  [bold]bmrs train net.py:make_model --data digits[/bold]
"""


def _unwrapped(text: str) -> str:
    """Paragraphs that the terminal breaks, and not the source."""
    return re.sub(r"(?<!\n)\n(?!\n)", " ", cleandoc(text))


app = typer.Typer(
    help=_unwrapped(_HELP), no_args_is_help=True, rich_markup_mode="rich", pretty_exceptions_show_locals=False
)
for command in (demo, inspect, train, prune, bench, report):
    app.command(help=_unwrapped(command.__doc__ or ""))(command)
app.add_typer(study, name="study")


def _version(show: bool) -> None:
    if show:
        print(f"bmrs {bmrs.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    pass


def main() -> None:
    app()
