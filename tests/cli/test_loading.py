"""How far a load is, for people: lines, bars that fit, and silence where it is asked for."""

from __future__ import annotations

import contextlib
import errno
import io
import sys
from collections.abc import Callable

import pytest

from caravan.cli import loading as module
from caravan.cli.loading import shown_loading, source
from caravan.llm.loading import DeviceLoad
from e2e.processes import caravan

MB = 10**6
GB = 10**9


def load(
    name: str = "RPC0", total: int = 0, disk: int = 0, cache: int = 0, network: int = 0
) -> DeviceLoad:
    return DeviceLoad(name, "host:1", total, disk, cache, network)


class Clock:
    def __init__(self) -> None:
        self.now = 50.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def at(clock, capsys):
    """What is said, with the devices' states, so long after the start."""
    lines = module._Lines(clock)

    def tell(seconds: float, *loads: DeviceLoad) -> list[str]:
        clock.now = 50.0 + seconds
        lines(loads)
        out, err = capsys.readouterr()
        assert out == ""
        return err.splitlines()

    return tell


def test_a_short_load_says_nothing(at):
    for seconds in (0.1, 3.0, 4.9):
        assert at(seconds, load(total=100 * MB, network=MB)) == []
    assert at(4.95, load(total=100 * MB, network=100 * MB)) == []


def test_a_line_for_each_device_every_few_seconds(at):
    two = (load(total=100 * MB, network=10 * MB), load("RPC1", 50 * MB), load("RPC2"))
    assert at(0.0, load(total=100 * MB)) == []
    assert at(4.0, *two) == []
    assert at(5.0, *two) == [
        "caravan: loading RPC0: 10 of 100 MB from network, 2 MB/s, 45 s left",
        "caravan: loading RPC1: 0 of 50 MB",
    ]
    assert at(5.1, *two) == at(9.9, *two) == []
    far = load(total=100 * MB, disk=10 * MB, cache=20 * MB, network=20 * MB)
    (line, _) = at(10.0, far, load("RPC1", 50 * MB), load("RPC2"))
    assert line == "caravan: loading RPC0: 50 of 100 MB from disk+cache+network, 5 MB/s, 10 s left"
    # the end is told once, if anything was
    end = (load(total=100 * MB, cache=100 * MB), load("RPC1"), load("RPC2"))
    assert at(12.5, *end) == ["caravan: loading RPC0: 100 of 100 MB from cache, 8 MB/s"]
    assert at(12.6, *end) == []


def test_a_device_that_is_done_is_told_once_with_its_own_speed(at):
    assert at(0.0, load(total=100 * MB)) == []
    both = (load(total=20 * MB, network=20 * MB), load("RPC1", 100 * MB, network=10 * MB))
    assert at(2.0, *both) == []
    assert at(10.0, *both) == [
        "caravan: loading RPC0: 20 of 20 MB from network, 10 MB/s",
        "caravan: loading RPC1: 10 of 100 MB from network, 1 MB/s, 1 min 30 s left",
    ]
    assert at(20.0, *both) == [
        "caravan: loading RPC1: 10 of 100 MB from network, 0 MB/s, 3 min 00 s left"
    ]


def test_before_anything_is_known(at):
    assert at(6.0, load(), load("RPC1")) == []
    assert at(7.0, load(total=MB)) == []


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.2, "0 s"),
        (59.4, "59 s"),
        (59.6, "1 min 00 s"),
        (61, "1 min 01 s"),
        (3599.7, "1 h 00 min"),
        (535_000, "148 h 36 min"),
    ],
)
def test_durations(seconds, text):
    assert module._duration(seconds) == text


def test_sources():
    assert source(load(total=5)) == ""
    assert source(load(total=5, disk=1)) == "disk"
    assert source(load(total=5, cache=1, network=3)) == "cache+network"
    assert source(load(total=5, disk=1, cache=1, network=3)) == "disk+cache+network"


class Full(io.StringIO):
    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_log_that_takes_no_more_does_not_end_the_load(clock, monkeypatch):
    monkeypatch.setattr(sys, "stderr", Full())
    lines = module._Lines(clock)
    clock.now += 10.0
    lines([load(total=MB)])


def test_what_is_loaded_once_more_is_told_of_anew(at):
    """After a loss; the speed is that of the new load."""
    assert len(at(10.0, load(total=100 * MB, network=50 * MB))) == 1
    assert len(at(11.0, load(total=100 * MB, network=100 * MB))) == 1
    # at first nothing is known of it
    assert at(500.0, load()) == at(504.0, load(total=100 * MB)) == []
    assert at(505.0, load(total=100 * MB)) == ["caravan: loading RPC0: 0 of 100 MB"]
    (line,) = at(510.0, load(total=100 * MB, network=100 * MB))
    assert "10 MB/s" in line


def test_a_second_load_that_is_short_says_nothing_either(at):
    assert at(1.0, load(total=100 * MB, network=100 * MB)) == []
    assert at(300.0, load(total=100 * MB)) == []
    assert at(300.5, load(total=100 * MB, cache=100 * MB)) == []


def test_what_broke_off_is_told_of_anew(at):
    """A device that was done has begun once more; and one that is gone was done, too."""
    done = load(total=20 * MB, network=20 * MB)
    assert len(at(5.0, done, load("RPC1", 100 * MB, network=10 * MB))) == 2
    again = (load(total=20 * MB), load("RPC1", 100 * MB))
    assert at(20.0, *again) == []
    again = (load(total=20 * MB, network=10 * MB), load("RPC1", 100 * MB))
    (line, _) = at(25.0, *again)
    assert line.startswith("caravan: loading RPC0: 10 of 20 MB from network, 2 MB/s")
    assert at(40.0, load("RPC1", 120 * MB)) == []
    (line,) = at(45.0, load("RPC1", 120 * MB, network=20 * MB))
    assert line.startswith("caravan: loading RPC1: 20 of 120 MB from network, 4 MB/s")


# bars


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def show(monkeypatch) -> Callable[[], Terminal]:
    """Begin to have a terminal of 80 columns on stderr."""

    def begin() -> Terminal:
        terminal = Terminal()
        monkeypatch.setattr(sys, "stderr", terminal)
        return terminal

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(module, "_PATIENCE_SECONDS", 0.0)
    return begin


def rendered(bars) -> list[str]:
    from rich.console import Console

    page = Console(width=80, file=io.StringIO())
    page.print(bars.get_renderable())
    return page.file.getvalue().splitlines()


def test_bars_fit_into_80_columns(show, monkeypatch):
    from rich.progress import Task

    show()

    monkeypatch.setattr(module._Speeds, "of", lambda speeds, load: 10_000.0 * MB)
    monkeypatch.setattr(Task, "time_remaining", property(lambda task: 52_000.0))
    third = 178 * GB
    with contextlib.ExitStack() as stack:
        bars = module._Bars(stack, False)
        bars(
            [
                load("local:CUDA0", 535 * GB, third, third, third),
                load("RPC15", 535 * GB, 0, 0, 535 * GB - 1),
                load("RPC16"),
            ]
        )
        lines = rendered(bars._bars)
    assert len(lines) == 2
    for line, words in (
        (lines[0], ["local:CUDA0", "534.0/535.0 GB", "10000 MB/s", "disk+cache+network"]),
        (lines[1], ["RPC15", "535.0/535.0 GB", "10000 MB/s", " network"]),
    ):
        assert len(line) <= 80
        assert "…" not in line
        for word in (*words, "14:26:40"):
            assert word in line, line


def test_bars_come_and_go(show, capsys):
    terminal = show()
    with shown_loading() as shown:
        shown([load(), load("RPC1")])
        assert terminal.getvalue() == ""
        shown([load(total=10 * MB), load("RPC1", 20 * MB)])
        shown([load(total=12 * MB, cache=6 * MB), load("RPC1", 20 * MB, 20 * MB)])
        shown([load(total=12 * MB, cache=12 * MB), load("RPC1", 20 * MB, 20 * MB)])
        said = terminal.getvalue()
        assert "12.0/12.0 MB" in said
        assert "\x1b[?25h" in said  # the cursor is back
        shown([load(total=12 * MB, cache=12 * MB), load("RPC1", 20 * MB, 20 * MB)])
        assert terminal.getvalue() == said
    assert capsys.readouterr().out == ""


def test_bars_of_a_load_that_fails(show):
    terminal = show()
    with pytest.raises(ZeroDivisionError), shown_loading() as shown:
        shown([load(total=10 * MB, network=1)])
        assert "\x1b[?25l" in terminal.getvalue()
        raise ZeroDivisionError
    assert "\x1b[?25h" in terminal.getvalue()


SHOWN, HIDDEN = "\x1b[?25h", "\x1b[?25l"


def test_a_load_that_breaks_off_leaves_the_line_to_others(show):
    """And the next one, on the device that is left, has bars of its own."""
    terminal = show()
    with shown_loading() as shown:
        shown([load(total=10 * MB, network=10 * MB), load("RPC1", 10 * MB)])
        shown.end()
        said = terminal.getvalue()
        assert said.endswith(f"\n{SHOWN}")
        shown([load("RPC1", 20 * MB, network=5 * MB)])
        bars = rendered(shown._bars)
        assert terminal.getvalue().count(HIDDEN) == 2
    assert len(bars) == 1
    assert "5.0/20.0 MB" in bars[0]


def test_bars_of_a_load_that_begins_once_more(show):
    """Nothing was said in between."""
    terminal = show()
    with shown_loading() as shown:
        shown([load(total=10 * MB, network=10 * MB), load("RPC1", 10 * MB)])
        shown([load("RPC1", 20 * MB)])
        assert [line.split()[0] for line in rendered(shown._bars)] == ["RPC1"]
    assert terminal.getvalue().count(HIDDEN) == terminal.getvalue().count(SHOWN) == 2


def test_a_short_load_has_no_bars(show, monkeypatch):
    terminal = show()
    monkeypatch.setattr(module, "_PATIENCE_SECONDS", 1000.0)
    with shown_loading() as shown:
        shown([load(total=10 * MB, network=1)])
    assert terminal.getvalue() == ""


# whom to tell


def test_quiet_shows_nothing(show):
    show()
    with shown_loading(True) as shown:
        assert shown is None


def test_run_is_quiet_where_that_is_asked_for(smollm2, tmp_path, monkeypatch):
    monkeypatch.setenv("CARAVAN_CACHE", str(tmp_path))
    words = ("run", "-m", str(smollm2), "-p", "Once", "-n", "2", "--temp", "0")
    done = caravan(*words, "--local-workers", "1", "--quiet")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout
