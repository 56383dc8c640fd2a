"""Memory that training on a processor frees and asks for again in every step."""

import contextlib
import ctypes

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX = -1, -2, -4  # glibc's names for them, from malloc.h


def keep_freed() -> None:
    """The C library keeps what is freed, for as long as the process lives.

    By itself glibc gives large blocks back to the system, and every page of the next step's activations is a fault
    first: a fifth of the time that LeNet-5s take to train. Other C libraries are left as they are.
    """
    with contextlib.suppress(AttributeError, OSError):
        choose = ctypes.CDLL(None).mallopt
        choose(_MMAP_MAX, 0)
        choose(_TRIM_THRESHOLD, 2**31 - 1)
        choose(_TOP_PAD, 1 << 26)
