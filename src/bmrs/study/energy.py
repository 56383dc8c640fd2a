"""Energy and CO₂ of a job: measured where a counter can be read, estimated where not, and said which.

NVIDIA GPUs count their own energy (NVML), or say their power (nvidia-smi); processors count theirs on Linux (RAPL).
Nothing that goes wrong in here reaches the job: a meter that breaks is left out, and the note says so.
"""

import importlib
import math
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import torch

from bmrs.study.shares import Share

WORLD_INTENSITY = 481.0  # g CO₂ per kWh, world average of 2023 (Ember)
WATTS_PER_CORE = 10.0  # a busy core of a common desktop or server processor, from its rated power
INTENSITY_VARIABLE = "BMRS_CARBON_INTENSITY"
_POWERCAP = Path("/sys/class/powercap")
_JOULES_PER_KWH = 3.6e6


class Source(Protocol):
    """Something that knows the energy used since it was made."""

    how: str  # "measured" or "estimated"
    note: str

    def joules(self) -> float: ...


class Meter:
    """Energy from ``with`` to now or, once left, to the end. ``result()`` may be asked at any time."""

    def __init__(
        self, device: str | torch.device, carbon_intensity: float | None = None, every: float = 5.0, alone: bool = True
    ) -> None:
        self.intensity, self.intensity_note = _intensity(carbon_intensity)
        self._alone = alone
        self._device = str(device)
        self._every = every
        self._sources: list[Share] = []
        self._joules: dict[str, float] = {}
        self._broken = False
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._tick, name="bmrs-energy", daemon=True)

    def __enter__(self) -> Self:
        try:
            self._sources = _sources(self._device, self._alone)
            if self._sources:
                self._thread.start()
        except Exception:  # whatever a driver or a file does, the job goes on
            self._broken = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._read()
        for share in self._sources:
            with suppress(Exception):
                share.close()
        if self._thread.is_alive():
            self._thread.join(timeout=2.0)

    def result(self) -> dict[str, Any]:
        """{"kwh", "co2_g", "how": "measured", "estimated" or "unavailable", "note"}."""
        if not self._stop.is_set():
            self._read()
        with self._lock:
            shares, joules = list(self._sources), sum(self._joules.values())
        sources: list[Source] = [share.source for share in shares]
        if not sources:
            reason = "the meter broke" if self._broken else f"nothing tells the energy of device '{self._device}'"
            return {"kwh": None, "co2_g": None, "how": "unavailable", "note": f"Energy is not known: {reason}."}
        kwh = joules / _JOULES_PER_KWH
        how = "measured" if all(source.how == "measured" for source in sources) else "estimated"
        left_out = " A meter broke on the way, so the true number is higher." if self._broken else ""
        note = f"{_and([s.note for s in sources])}; memory, mains losses and cooling are not counted"
        if any(share.divided for share in shares):
            note += "; tasks that ran side by side are each given an equal share"
        return {
            "kwh": kwh,
            "co2_g": kwh * self.intensity,
            "how": how,
            "note": f"{note[0].upper()}{note[1:]}. {self.intensity_note}{left_out}",
        }

    def _tick(self) -> None:
        # Counters wrap around within minutes, and power is only known when asked: look now and then.
        while not self._stop.wait(self._every):
            self._read()

    def _read(self) -> None:
        with self._lock:
            for share in list(self._sources):
                note = share.source.note
                try:
                    self._joules[note] = share.used()
                except Exception:  # what it said so far stays
                    self._broken = True
                    if note not in self._joules:
                        self._sources.remove(share)


def measured(device: str | torch.device, carbon_intensity: float | None = None, *, alone: bool = True) -> Meter:
    """The energy of what runs inside: ``with measured("cuda") as energy: ...; energy.result()``.

    ``carbon_intensity`` in g CO₂ per kWh: the argument, else BMRS_CARBON_INTENSITY, else the world average.
    Tasks of this process that run side by side are each given an equal share. ``alone``: no task of another process,
    whose energy is counted there, shares the processor. Where one may, the counter of the whole processor is not read:
    everyone would count everyone.
    """
    return Meter(device, carbon_intensity, alone=alone)


def total(results: Iterable[Mapping[str, Any] | None]) -> dict[str, Any] | None:
    """The sum of several results: as good as the worst of them; None when there is none."""
    known = [result for result in results if result is not None]
    if not known:
        return None
    with_number = [result for result in known if result["kwh"] is not None]
    notes = list(dict.fromkeys(str(result["note"]) for result in known))
    if not with_number:
        return {"kwh": None, "co2_g": None, "how": "unavailable", "note": " ".join(notes)}
    missing = len(known) - len(with_number)
    if missing:
        notes.append(f"{missing} of {len(known)} parts are not counted, so the true number is higher.")
    co2 = [result["co2_g"] for result in with_number]
    return {
        "kwh": math.fsum(result["kwh"] for result in with_number),
        "co2_g": None if None in co2 else math.fsum(co2),
        "how": "measured" if all(result["how"] == "measured" for result in known) else "estimated",
        "note": " ".join(notes),
    }


def _intensity(given: float | None) -> tuple[float, str]:
    source = "as given"
    if given is None and os.environ.get(INTENSITY_VARIABLE):
        source = f"from {INTENSITY_VARIABLE}"
        try:
            given = float(os.environ[INTENSITY_VARIABLE])
        except ValueError:
            given = math.nan
    if given is None:
        return WORLD_INTENSITY, f"CO₂ at {WORLD_INTENSITY:g} g/kWh, the world's average of 2023 (Ember)."
    if not (math.isfinite(given) and given >= 0):
        raise ValueError(f"{INTENSITY_VARIABLE} (carbon_intensity) must be a number of g CO₂ per kWh, 0 or more.")
    return given, f"CO₂ at {given:g} g/kWh, {source}."


def _sources(device: str, alone: bool = True) -> list[Share]:
    def share(source: Callable[..., Source], *place: str) -> Share:
        return Share((source, *place), lambda: source(*place), lambda made: made.joules())

    kind = torch.device(device).type
    if kind not in ("cuda", "cpu"):
        return []
    found: list[Share] = []
    if kind == "cuda":
        for gpu in (_NvmlCounter, _SmiPower):
            with suppress(Exception):  # not installed, not allowed, too old a GPU: try the next
                found.append(share(gpu, device))
                break
        else:
            return []  # the processor's share alone would mislead
    try:
        if not alone:
            raise OSError("the counter of the whole processor says nothing about this task")
        found.append(share(_Rapl))
    except (OSError, ValueError):
        if kind == "cpu":
            found.append(share(_CpuTime))
        else:
            left_out = "; the processor is not counted"
            made = found[0].source
            made.note = made.note.removesuffix(left_out) + left_out
    return found


class _NvmlCounter:
    """The GPU's own count, in millijoules since its driver started."""

    how = "measured"

    def __init__(self, device: str) -> None:
        self._nvml: Any = importlib.import_module("pynvml")
        self._nvml.nvmlInit()
        self._gpu = self._nvml.nvmlDeviceGetHandleByUUID(_uuid(device))
        self.note = "the whole GPU by its own counter (NVML)"
        self._start = self._count()

    def _count(self) -> float:
        return float(self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._gpu)) / 1e3

    def joules(self) -> float:
        return self._count() - self._start


class _SmiPower:
    """The GPU's power as nvidia-smi says it, summed over time by the trapezium rule."""

    how = "measured"

    def __init__(self, device: str) -> None:
        self._uuid = _uuid(device)
        self.note = "the whole GPU by samples of its power (nvidia-smi)"
        self._joules = 0.0
        self._last = (time.monotonic(), self._watts())

    def _watts(self) -> float:
        command = ["nvidia-smi", f"--id={self._uuid}", "--query-gpu=power.draw", "--format=csv,noheader,nounits"]
        return float(subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout)

    def joules(self) -> float:
        now, watts = time.monotonic(), self._watts()
        self._joules += (now - self._last[0]) * (watts + self._last[1]) / 2
        self._last = (now, watts)
        return self._joules


class _Rapl:
    """The processors' own counts in microjoules, one file per package; they begin again at a maximum."""

    how = "measured"

    def __init__(self) -> None:
        # intel-rapl:0 is a package, also on AMD; intel-rapl:0:1 is a part of one.
        self._files = {
            folder / "energy_uj": int((folder / "max_energy_range_uj").read_text())
            for folder in sorted(_POWERCAP.glob("intel-rapl:*"))
            if folder.name.count(":") == 1 and (folder / "name").read_text().startswith("package")
        }
        if not self._files:
            raise OSError("no counter of a processor package")
        self.note = "the whole processor by its own counter (RAPL)"
        self._last = {file: int(file.read_text()) for file in self._files}
        self._joules = 0.0

    def joules(self) -> float:
        for file, most in self._files.items():
            now = int(file.read_text())
            step = now - self._last[file]
            self._joules += (step if step >= 0 else step + most) / 1e6
            self._last[file] = now
        return self._joules


class _CpuTime:
    """Seconds of processor time, this process's and its children's, times a rated power."""

    how = "estimated"

    def __init__(self) -> None:
        self.note = f"estimated from processor time at {WATTS_PER_CORE:g} W per busy core"
        self._start = self._seconds()

    def _seconds(self) -> float:
        return sum(os.times()[:4])

    def joules(self) -> float:
        return (self._seconds() - self._start) * WATTS_PER_CORE


def _uuid(device: str) -> str:
    """The GPU's name for NVML, which numbers GPUs otherwise than torch when some are hidden."""
    uuid = str(torch.cuda.get_device_properties(torch.device(device)).uuid)
    return uuid if uuid.startswith("GPU-") else f"GPU-{uuid}"


def _and(notes: list[str]) -> str:
    return " and ".join(notes)
