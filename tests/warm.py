"""Imported by the process the others are forked from: once here, what each of them would spend seconds on.

Nothing is differentiated, since that starts threads, which do not survive a fork.
"""

import gc

import torch
from torch import nn

import bmrs
import tests.parallel_worker
import tests.sharded_worker  # noqa: F401

bmrs.structures(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2)), torch.ones(2, 2))
gc.freeze()  # all of this stays: nobody need look at it when searching for objects
