"""Smaller, faster neural networks without tuning a threshold: Bayesian model reduction for structured pruning."""

from bmrs import cost, criteria, evidence, price
from bmrs.checkpoint import load, save
from bmrs.criteria import BMRS_N, BMRS_U, L2, SNR, Criterion, Gradient, Mean, Units
from bmrs.decision import prune
from bmrs.export import export_onnx, export_program
from bmrs.gates import Gate
from bmrs.noise import NoiseBank
from bmrs.posterior import TruncatedLogNormal
from bmrs.pruner import Pruner, Ranked
from bmrs.reporting import PruneReport, StructureReport
from bmrs.structure import Structure, Structures, remove, structures

__version__ = "0.1.0"

__all__ = [
    "BMRS_N",
    "BMRS_U",
    "L2",
    "SNR",
    "Criterion",
    "Gate",
    "Gradient",
    "Mean",
    "NoiseBank",
    "PruneReport",
    "Pruner",
    "Ranked",
    "Structure",
    "StructureReport",
    "Structures",
    "TruncatedLogNormal",
    "Units",
    "__version__",
    "cost",
    "criteria",
    "evidence",
    "export_onnx",
    "export_program",
    "load",
    "price",
    "prune",
    "remove",
    "save",
    "structures",
]
