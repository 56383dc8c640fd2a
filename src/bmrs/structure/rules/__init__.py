"""One rule per ATen operation: how it ties the dimensions of what it reads and what it makes.

A rule gets a :class:`Step` and the operation's own arguments, tensors as :class:`Value`, and returns the dimensions
of the result. It must account for *every* dimension: tie it, pass it on, or freeze it with a reason. An operation
without a rule freezes all it touches.
"""

from bmrs.structure.rules import contractions, images, pointwise, rearrange, statistics
from bmrs.structure.rules.base import ONE, RULES, Consumer, Facts, Place, Step, Value, Work, freeze_all, values_in

__all__ = [
    "ONE", "RULES", "Consumer", "Facts", "Place", "Step", "Value", "Work", "contractions", "freeze_all", "images",
    "pointwise", "rearrange", "statistics", "values_in",
]  # fmt: skip
