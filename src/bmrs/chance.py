"""Random numbers of a network's gates: draw number n on process r is a function of the seed, r and n alone.

So nothing else that draws disturbs them, every process has its own, and a run is resumed by two integers.
"""

from torch import distributed

_MASK = (1 << 64) - 1


def key(seed: int, rank: int) -> int:
    """What names the draws of one process, in 32 bits."""
    return _mixed(_mixed(seed & _MASK) ^ rank) >> 32


def rank() -> int:
    """The number of this process among those that train together."""
    return distributed.get_rank() if distributed.is_available() and distributed.is_initialized() else 0


def _mixed(number: int) -> int:
    """SplitMix64's finaliser: neighbours become strangers."""
    number = (number + 0x9E3779B97F4A7C15) & _MASK
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & _MASK
    return number ^ (number >> 31)
