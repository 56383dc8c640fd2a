import subprocess
import sys
import threading
import time
import types

import pytest
import torch

from bmrs.study import energy
from bmrs.study.energy import measured, total


@pytest.fixture(autouse=True)
def no_counters(tmp_path, monkeypatch):
    """A machine without counters, whatever this one has."""
    monkeypatch.setattr(energy, "_POWERCAP", tmp_path)
    monkeypatch.delenv(energy.INTENSITY_VARIABLE, raising=False)


def package(folder, number, count, most=1000_000_000):
    place = folder / f"intel-rapl:{number}"
    place.mkdir(exist_ok=True)
    (place / "name").write_text(f"package-{number}\n")
    (place / "max_energy_range_uj").write_text(f"{most}\n")
    (place / "energy_uj").write_text(f"{count}\n")
    return place


def gpu(monkeypatch, counts):
    """A GPU whose counter says these millijoules, one after another."""
    said = iter(counts)
    nvml = types.SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByUUID=lambda uuid: uuid,
        nvmlDeviceGetTotalEnergyConsumption=lambda handle: {"GPU-abc": lambda: next(said)}[handle](),
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: types.SimpleNamespace(uuid="abc"))


class TestProcessor:
    def test_counters_of_all_packages(self, tmp_path):
        package(tmp_path, 0, 100_000_000)
        package(tmp_path, 1, 500_000_000)
        (tmp_path / "intel-rapl:0:0").mkdir()  # a part of a package: not counted twice
        with measured("cpu", carbon_intensity=100.0) as meter:
            package(tmp_path, 0, 136_000_000)
            package(tmp_path, 1, 500_000_000)
        result = meter.result()
        assert result["kwh"] == pytest.approx(36 / 3.6e6)
        assert result["co2_g"] == pytest.approx(36 / 3.6e6 * 100)
        assert result["how"] == "measured"
        assert "whole processor" in result["note"]
        assert "100 g/kWh, as given" in result["note"]

    def test_the_whole_processor_is_not_counted_by_each_of_several_tasks(self, tmp_path, monkeypatch):
        package(tmp_path, 0, 100_000_000)
        clock = iter([3.0, 5.0, 5.0])
        monkeypatch.setattr(energy.os, "times", lambda: (next(clock), 0.0, 0.0, 0.0))
        with measured("cpu", alone=False) as meter:
            package(tmp_path, 0, 136_000_000)
        assert meter.result()["kwh"] == pytest.approx(2.0 * energy.WATTS_PER_CORE / 3.6e6)
        assert meter.result()["how"] == "estimated"

    def test_a_counter_that_begins_again(self, tmp_path):
        package(tmp_path, 0, 900_000_000)
        with measured("cpu") as meter:
            package(tmp_path, 0, 100_000_000)
        assert meter.result()["kwh"] == pytest.approx(200 / 3.6e6)

    def test_it_is_looked_at_now_and_then(self, tmp_path):
        package(tmp_path, 0, 0)
        with energy.Meter("cpu", every=0.01) as meter:
            for count in (600_000_000, 200_000_000):  # round once: seen only by who looks in between
                package(tmp_path, 0, count)
                seen = time.monotonic() + 5
                while meter._joules.get("the whole processor by its own counter (RAPL)", 0) < count / 1e6:
                    assert time.monotonic() < seen
                    time.sleep(0.005)
        assert meter.result()["kwh"] == pytest.approx(1200 / 3.6e6)

    def test_without_counters_it_is_an_estimate(self):
        with measured("cpu") as meter:
            end = time.process_time() + 0.2
            while time.process_time() < end:
                pass
        result = meter.result()
        assert result["how"] == "estimated"
        assert 0.15 * energy.WATTS_PER_CORE < result["kwh"] * 3.6e6 < 2 * energy.WATTS_PER_CORE
        assert "10 W per busy core" in result["note"]

    def test_so_far_and_then_fixed(self, tmp_path):
        package(tmp_path, 0, 0)
        with measured("cpu") as meter:
            package(tmp_path, 0, 3_600_000)
            assert meter.result()["kwh"] == pytest.approx(1e-6)
            package(tmp_path, 0, 7_200_000)
        package(tmp_path, 0, 900_000_000)
        assert meter.result()["kwh"] == pytest.approx(2e-6)
        assert "bmrs-energy" not in {thread.name for thread in threading.enumerate()}

    def test_a_counter_that_breaks_keeps_what_it_said(self, tmp_path):
        place = package(tmp_path, 0, 0)
        with measured("cpu") as meter:
            package(tmp_path, 0, 3_600_000)
            meter.result()
            (place / "energy_uj").unlink()
        result = meter.result()
        assert result["kwh"] == pytest.approx(1e-6)
        assert "the true number is higher" in result["note"]


class TestGpu:
    def test_its_own_counter(self, monkeypatch):
        gpu(monkeypatch, [5_000, 41_000])
        with measured("cuda") as meter:
            pass
        result = meter.result()
        assert result["kwh"] == pytest.approx(36 / 3.6e6)
        assert result["how"] == "measured"
        assert "the processor is not counted" in result["note"]

    def test_with_the_processor(self, monkeypatch, tmp_path):
        gpu(monkeypatch, [5_000, 41_000])
        package(tmp_path, 0, 0)
        with measured("cuda") as meter:
            package(tmp_path, 0, 36_000_000)
        result = meter.result()
        assert result["kwh"] == pytest.approx(72 / 3.6e6)
        assert "GPU" in result["note"]
        assert "whole processor" in result["note"]

    def test_samples_of_its_power(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "pynvml", None)  # not installed
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: types.SimpleNamespace(uuid="GPU-abc"))
        watts, clock = iter(["100.0\n", "300.0\n", "300.0\n"]), iter([0.0, 10.0, 20.0])

        def smi(command, **options):
            assert command[:2] == ["nvidia-smi", "--id=GPU-abc"]
            return types.SimpleNamespace(stdout=next(watts))

        monkeypatch.setattr(subprocess, "run", smi)
        source = None
        monkeypatch.setattr(energy.time, "monotonic", lambda: next(clock))
        source = energy._SmiPower("cuda")
        assert source.joules() == pytest.approx(2000.0)
        assert source.joules() == pytest.approx(5000.0)

    def test_nothing_known(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "pynvml", None)
        with measured("cuda") as meter:
            pass
        assert meter.result()["how"] == "unavailable"
        assert meter.result()["kwh"] is None
        assert meter.result()["co2_g"] is None


class TestNeverInTheWay:
    @pytest.mark.parametrize("name", ["_sources", "_Rapl", "_CpuTime"])
    def test_whatever_breaks_the_job_goes_on(self, monkeypatch, name):
        monkeypatch.setattr(energy, name, lambda *_: 1 / 0)
        with measured("cpu") as meter:
            done = True
        assert done
        assert meter.result()["how"] == "unavailable"

    def test_errors_of_the_job_pass(self):
        with pytest.raises(KeyError), measured("cpu"):
            raise KeyError


class TestIntensity:
    def test_the_worlds_average_is_named(self):
        with measured("cpu") as meter:
            pass
        assert "481 g/kWh, the world's average of 2023 (Ember)" in meter.result()["note"]

    def test_from_the_environment(self, monkeypatch):
        monkeypatch.setenv("BMRS_CARBON_INTENSITY", "56.5")
        with measured("cpu") as meter:
            sum(range(1000))
        result = meter.result()
        assert result["co2_g"] == pytest.approx(result["kwh"] * 56.5)
        assert "56.5 g/kWh, from BMRS_CARBON_INTENSITY" in result["note"]

    @pytest.mark.parametrize("wrong", ["green", "-1", "nan"])
    def test_nonsense_is_refused_before_the_job(self, monkeypatch, wrong):
        monkeypatch.setenv("BMRS_CARBON_INTENSITY", wrong)
        with pytest.raises(ValueError, match="BMRS_CARBON_INTENSITY"):
            measured("cpu")


class TestTotal:
    GOOD = {"kwh": 1.0, "co2_g": 500.0, "how": "measured", "note": "Counter."}  # noqa: RUF012
    GUESS = {"kwh": 0.5, "co2_g": 250.0, "how": "estimated", "note": "Guess."}  # noqa: RUF012
    NONE = {"kwh": None, "co2_g": None, "how": "unavailable", "note": "Unknown."}  # noqa: RUF012

    def test_is_as_good_as_its_worst_part(self):
        assert total([self.GOOD, self.GOOD]) == {**self.GOOD, "kwh": 2.0, "co2_g": 1000.0}
        mixed = total([self.GOOD, None, self.GUESS])
        assert (mixed["kwh"], mixed["co2_g"], mixed["how"]) == (1.5, 750.0, "estimated")
        assert mixed["note"] == "Counter. Guess."

    def test_says_what_is_missing(self):
        part = total([self.GOOD, self.NONE])
        assert (part["kwh"], part["how"]) == (1.0, "estimated")
        assert "1 of 2 parts are not counted" in part["note"]
        assert total([self.NONE])["how"] == "unavailable"
        assert total([None]) is None
