"""Several processes at once, forked from one that has imported torch already: what takes seconds is done once."""

import datetime
import multiprocessing
import os
import runpy
import socket
import sys
import time
import traceback
from multiprocessing.connection import wait

from torch import distributed


def together(count, task, *arguments, seconds=240):
    """Call a function of a module in ``count`` processes of one group; an error in one of them is an error here."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.warm"])
    port, started, ends = free_port(), [], []
    for rank in range(count):
        here, there = context.Pipe(duplex=False)
        process = context.Process(target=_run, args=(rank, count, port, there, task, arguments), daemon=True)
        process.start()
        there.close()
        started.append(process)
        ends.append(here)
    errors, waiting, last = [], list(ends), time.monotonic() + seconds
    while waiting and not errors:
        ready = wait(waiting, timeout=max(0.0, last - time.monotonic()))
        errors += [] if ready else [f"no end after {seconds} s"]
        for one in ready:
            waiting.remove(one)
            try:
                errors += [text for text in [one.recv()] if text]
            except EOFError:
                errors.append(f"process {ends.index(one)} died")
    for process in started:
        process.join(10 if not errors else 0)
        process.terminate()
    assert not errors, errors[0]


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def _run(rank, count, port, end, task, arguments):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(count), MASTER_ADDR="localhost",
                      MASTER_PORT=str(port), OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")  # fmt: skip
    error = ""
    try:
        task(*arguments)
        if distributed.is_initialized():
            distributed.destroy_process_group()
    except BaseException:
        error = traceback.format_exc()
    end.send(error)


def in_group(task, *arguments):
    """As a task of :func:`together`: this function in a gloo group."""
    distributed.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    task(*arguments)


def script(path, output, *arguments):
    """As a task of :func:`together`: a program, what it prints in a file per process."""
    sys.argv = [str(path), *map(str, arguments)]
    with open(f"{output}-{os.environ['RANK']}", "w") as sys.stdout:
        runpy.run_path(str(path), run_name="__main__")
