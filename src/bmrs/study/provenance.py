"""How a result was made: what every JSON file of ours carries beside its numbers."""

import datetime
import os
import platform
import shlex
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import bmrs


def provenance(**settings: Any) -> dict[str, Any]:
    """Command, date, machine, versions and commit, with the settings the caller adds (seeds, device, ...)."""
    return {
        "command": shlex.join([*_program(), *sys.argv[1:]]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": _machine(),
        "versions": {"bmrs": bmrs.__version__, "python": platform.python_version(), **_versions()},
        "commit": _commit(),
        **settings,
    }


def _program() -> list[str]:
    """What was called, as one would type it."""
    path = Path(sys.argv[0])
    return ["python", "-m", path.parent.name] if path.name == "__main__.py" else [path.name]


def _versions() -> dict[str, str]:
    found = {}
    for name in ("torch", "numpy", "scipy", "scikit-learn"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _machine() -> str:
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"{_cpu_model()}, {os.cpu_count()} cores"


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def _commit() -> str:
    """Of the checkout this package runs from, marked when it has changes; 'not a checkout' for an install.

    BMRS_COMMIT says it where the files were copied without their history.
    """
    if "BMRS_COMMIT" in os.environ:
        return os.environ["BMRS_COMMIT"]
    here = Path(__file__).resolve().parent

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", *arguments], cwd=here, capture_output=True, text=True, check=True, timeout=10
        ).stdout.strip()

    try:
        if git("ls-files", "--error-unmatch", __file__):
            return git("rev-parse", "HEAD") + (" with changes" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.SubprocessError):
        pass
    return "not a checkout"
