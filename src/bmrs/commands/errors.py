"""What went wrong, in one sentence on stderr, and the exit code that says whose turn it is.

====  ============================================================
code  when
====  ============================================================
0     done
1     failed while running: memory, disk, a loss that became NaN
2     bad input: nothing was done, change the command
130   interrupted by Ctrl-C
====  ============================================================

``BMRS_DEBUG=1`` shows the traceback too.
"""

import contextlib
import os
import sys
import traceback
import warnings
from collections.abc import Iterator
from typing import NoReturn

import torch
import typer
from rich.console import Console
from rich.text import Text

from bmrs import chance
from bmrs.commands.screens import say
from bmrs.inspection import where_in
from bmrs.structure.capture import CannotCaptureError

FAILED, BAD_INPUT, INTERRUPTED = 1, 2, 130


class RunError(RuntimeError):
    """It went wrong while running, whatever the kind of error: exit code 1."""


@contextlib.contextmanager
def guard(*, needs: str = "demo", stopped: str = "stopped.") -> Iterator[None]:
    """Errors, warnings and Ctrl-C in one sentence each. ``needs``: the extra with what may be missing."""
    with warnings.catch_warnings():
        for category in (UserWarning, RuntimeWarning):
            warnings.simplefilter("default", category)
        shown = warnings.showwarning
        warnings.showwarning = lambda message, category, *rest, **more: (
            note(str(message)) if category.__module__ != "builtins" or category in (UserWarning, RuntimeWarning)
            else shown(message, category, *rest, **more)
        )  # fmt: skip
        try:
            yield
        except KeyboardInterrupt:
            note(stopped)
            raise typer.Exit(INTERRUPTED) from None
        except ImportError as missing:
            said = str(missing) if "pip install" in str(missing) else (
                f"this needs '{missing.name}': install it with  pip install 'bmrs[{needs}]'"
            )  # fmt: skip
            fail(said, BAD_INPUT)
        except torch.OutOfMemoryError:
            fail("the GPU's memory is too small for this: give a smaller --batch, or --device cpu.", FAILED)
        except MemoryError:
            fail("the memory is too small for this: give a smaller --batch.", FAILED)
        except (ValueError, TypeError, CannotCaptureError) as wrong:
            fail(str(wrong), BAD_INPUT)
        except (RuntimeError, OSError) as wrong:
            fail(str(wrong), FAILED)


@contextlib.contextmanager
def running(what: str) -> Iterator[None]:
    """What fails in here, in the user's code too, failed while running: a sentence that says where."""
    try:
        yield
    except (KeyboardInterrupt, torch.OutOfMemoryError, MemoryError, RunError):
        raise
    except OSError as wrong:
        raise RunError(f"{what} failed ({wrong}): make room or choose another --out, and give it again.") from wrong
    except Exception as wrong:
        raise RunError(f"{what} failed{where_in(wrong)}.") from wrong


def fail(sentence: str, code: int = BAD_INPUT) -> NoReturn:
    if os.environ.get("BMRS_DEBUG"):
        traceback.print_exc()
    # Of several processes that were given the same, one says what is wrong with it.
    if code != BAD_INPUT or chance.rank() == 0:
        note(sentence)
    raise typer.Exit(code)


def note(sentence: str) -> None:
    say(Console(file=sys.stderr), Text.assemble(("bmrs: ", "red"), sentence))


def device_of(name: str) -> torch.device:
    """The device of that name; refuses what is not there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"--device: unknown device '{name}': give cuda, cuda:1, cpu or auto.") from None
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"--device: '{name}' cannot be used, for gates need float64 there: give cuda, cpu or auto.")
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise ValueError("--device: there is no GPU that torch can use: give cpu or auto.")
        if (device.index or 0) >= torch.cuda.device_count():
            raise ValueError(f"--device: there are {torch.cuda.device_count()} GPUs, and '{name}' is none of them.")
    return device
