"""What a call of ``Pruner.prune`` did, for people and for programs."""

from dataclasses import asdict, dataclass
from typing import Any

Range = tuple[float, float]


@dataclass(frozen=True)
class StructureReport:
    """One structure. ΔF is the log evidence without a unit minus with it; None where no such unit has any."""

    name: str
    kind: str
    before: int
    removed: int
    spared: bool  # all of its units were to go, and the best one stayed
    delta_f_removed: Range | None
    delta_f_kept: Range | None
    for_width: int = 0  # units that were to go, and stayed for a width that is a multiple of round_to

    @property
    def left(self) -> int:
        return self.before - self.removed


@dataclass(frozen=True)
class PruneReport:
    """What was removed. Print it for a table."""

    structures: tuple[StructureReport, ...]
    parameters_before: int
    parameters: int
    criterion: str
    round_to: int = 1

    @property
    def removed(self) -> int:
        """Units removed now, in all structures."""
        return sum(row.removed for row in self.structures)

    @property
    def units(self) -> int:
        """Units left."""
        return sum(row.left for row in self.structures)

    def to_json(self) -> dict[str, Any]:
        """The table for programs."""
        rows = [{**asdict(row), "left": row.left} for row in self.structures]
        return {**asdict(self), "structures": rows, "removed": self.removed, "units": self.units}

    def __str__(self) -> str:
        share = f", {1 - self.parameters / self.parameters_before:.1%} fewer" if self.removed else ""
        units = "1 unit" if self.removed == 1 else f"{self.removed:,} units"
        lines = [
            f"{units} removed by {self.criterion}, {self.units:,} left; "
            f"{self.parameters_before:,} parameters → {self.parameters:,}{share}"
        ]
        rows = [("structure", "kind", "before", "removed", "left", "ΔF of removed", "ΔF of kept")]
        for row in self.structures:
            marks = ("*" if row.spared else "") + (f" (+{row.for_width:,})" if row.for_width else "")
            left = f"{row.left:,}{marks}"
            counts = (f"{row.before:,}", f"{row.removed:,}", left)
            rows.append((row.name, row.kind, *counts, _span(row.delta_f_removed), _span(row.delta_f_kept)))
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        for cells in rows:
            made = [c.ljust(w) if n < 2 else c.rjust(w) for n, (c, w) in enumerate(zip(cells, widths, strict=True))]
            lines.append("  ".join(made).rstrip())
        if any(row.spared for row in self.structures):
            lines.append("* all of its units were to go: a layer keeps at least its best one")
        if any(row.for_width for row in self.structures):
            lines.append(f"(+n) so many of them were to go, and stay for widths that are multiples of {self.round_to}")
        return "\n".join(lines)


def _span(values: Range | None) -> str:
    return "" if values is None else f"{values[0]:.3g} … {values[1]:.3g}"
