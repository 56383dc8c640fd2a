"""What tests have workers do: functions of a module, since they travel."""

import logging
import os
import signal
import time
import warnings
from pathlib import Path

from bmrs.study.files import DataError


def count(folder, name, steps, *, pause=0.0, dies_at=0, checkpoint, resume, progress):
    """Steps that leave a line each in a file; the first attempt may take its worker down."""
    done, value = (resume["done"], resume["value"]) if resume else (0, 0)
    first = not (lines := Path(folder) / name).exists()
    for step in range(done + 1, steps + 1):
        with lines.open("a") as file:
            file.write(f"{step}\n")
        value = (31 * value + step) % 1_000_003
        checkpoint({"done": step, "value": value})
        progress(step, steps)
        time.sleep(pause)
        if first and step == dies_at:
            os.kill(os.getpid(), signal.SIGKILL)
    return {"value": value, "began": done}


def fails(folder, name, kind, **_):
    with (Path(folder) / name).open("a") as file:
        file.write("tried\n")
    if kind == "data":
        raise DataError("mnist is not complete in /nowhere")
    raise RuntimeError("the same\nevery time")


def talks(**_):
    warnings.warn("take care", UserWarning, stacklevel=1)
    logging.getLogger("some.library").warning("a line of %s", "a log")
    print("something printed")
    return {}


def peak(setting, *, device, data_dir):
    """Best at a learning rate of 0.01; trials take longer the further they are off."""

    def objective(parameters):
        off = abs(parameters["learning_rate"] - 0.01)
        time.sleep(min(0.3, 10 * off))
        return -off

    return objective
