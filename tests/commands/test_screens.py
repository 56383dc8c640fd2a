import io

import pytest
from rich.console import Console

from bmrs.commands import screens
from bmrs.commands.screens import Screen


class Clock:
    now = 1000.0

    def monotonic(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(screens, "time", clock)
    return clock


def console(width, terminal):
    return Console(file=io.StringIO(), width=width, force_terminal=terminal, color_system=None, legacy_windows=False)


def drawn(screen, width):
    shown = console(width, True)
    screen.console = shown
    shown.print(screen.render())
    return shown.file.getvalue().rstrip("\n").split("\n")


@pytest.mark.parametrize("width", [80, 120])
def test_a_line_for_each_phase_and_structure_however_narrow(clock, width):
    screen = Screen(console(width, True), ("whole", "prune", "fine-tune"))
    screen.epoch("whole", 50, 50, "validation 97.8%")
    screen.epoch("prune", 1, 40, "validation 91.8%", {"conv1": 6, "conv2": 16, "fc1": 1120})
    clock.now += 9000
    screen.epoch("prune", 11, 40, "validation 95.8%", {"conv1": 5, "conv2": 9, "fc1": 1023})
    screen.step("prune", 11, 40, 3, 12)
    lines = drawn(screen, width)
    assert len(lines) == 6
    assert all(len(line) <= width for line in lines)
    assert "epoch 50/50" in lines[0]
    # Ten and a quarter epochs took 9,000 seconds: 28.75 more take 7 h 0 min 44 s.
    assert "validation 95.8%" in lines[1]
    assert "7 h 0 min left" in lines[1]
    assert "1,023 of 1,120" in lines[4]


def test_many_structures_share_a_line(clock):
    screen = Screen(console(80, True), ("prune", "fine-tune"))
    screen.epoch("prune", 1, 40, "loss 0.1", {f"layer{n}": 10 for n in range(40)})
    screen.epoch("prune", 2, 40, "loss 0.1", {f"layer{n}": 7 for n in range(40)})
    lines = drawn(screen, 80)
    assert len(lines) == 3
    assert "280 of 400" in lines[1]


def test_elsewhere_it_says_a_line_now_and_then(clock):
    screen = Screen(console(200, False), ("prune",))
    with screen:
        for epoch in range(1, 13):
            for step in range(1, 5):
                screen.step("prune", epoch - 1, 12, step, 4)
            screen.epoch("prune", epoch, 12, "validation 90.0%", {"0": 20 - epoch})
        said = screen.console.file.getvalue().splitlines()
        assert [line.split("epoch")[1].split()[0] for line in said] == ["1/12", "5/12", "10/12", "12/12"]
        assert said[1].endswith("validation 90.0%  0 15")
        # An epoch that lasts is heard of within it.
        clock.now += 31
        screen.step("prune", 12, 24, 2, 4)
        clock.now += 1
        screen.step("prune", 12, 24, 3, 4)
    said = screen.console.file.getvalue().splitlines()
    assert len(said) == 5
    assert "step 2 of 4" in said[4]
    assert said[4].endswith(" left")


def test_prose_breaks_between_words_on_a_terminal_and_nowhere_else():
    sentence = "units go where the evidence says so: " + " ".join(f"word{n}" for n in range(20))
    for terminal in (True, False):
        shown = console(40, terminal)
        screens.say(shown, sentence)
        lines = shown.file.getvalue().rstrip("\n").split("\n")
        assert " ".join(line.rstrip() for line in lines) == sentence
        assert (len(lines) > 3) == terminal
