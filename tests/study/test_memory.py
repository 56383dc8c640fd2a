import platform
import subprocess
import sys

import pytest

STEPS = """
import resource, sys
import torch
from bmrs.study.memory import keep_freed

if sys.argv[1] == "kept":
    keep_freed()
for _ in range(4):  # blocks of an alignment take turns in two places
    torch.ones(1 << 24)  # 64 MiB, freed at once
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    torch.ones(1 << 24)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(how):
    done = subprocess.run([sys.executable, "-c", STEPS, how], capture_output=True, text=True, check=True, timeout=120)
    return int(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_what_was_freed_is_not_asked_for_again():
    kept, given_back = faults("kept"), faults("given back")
    assert kept < 100
    assert given_back > 10 * max(1, kept)  # or the C library has learned it: then this module can go
