"""Where results go."""

import os
import tempfile
from pathlib import Path


def writable(folder: Path) -> Path:
    """Make the folder; refuses one that cannot be made or written to before anything is computed."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as wrong:
        made = "written to" if folder.is_dir() else "made"
        raise ValueError(
            f"--out names a folder that cannot be {made}, {folder} ({os.strerror(wrong.errno or 0)}): choose another."
        ) from wrong
    return folder
