"""A plan as a picture: what is told in it, that it can be read, and what is left when it fails."""

from __future__ import annotations

import errno
import itertools
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from caravan.errors import CaravanError, UsageError
from caravan.plan.options import Option, Plan
from caravan.plan.picture import canvas, check_path, compose, draw
from caravan.plan.picture.curves import MOST, curves
from caravan.plan.picture.speedups import _apart, _dots
from caravan.plan.pipeline import HeadTimes, Setting, Traffic
from caravan.plan.profile import ClusterProfile, DeviceProfile, LinkProfile
from caravan.plan.times import DeviceTimes, Grid
from test_architecture import ROOT, imports

NEAR = LinkProfile(0.0002, 1.2e9)
FAR = LinkProfile(0.05, 1e7)


def grid(layer: float, output: float, n_layer: int) -> Grid:
    """Seconds of a layer for one token, and nine times as many for 512."""
    seconds = np.full((2, 1, n_layer + 1), layer)
    seconds[1] *= 9
    seconds[..., -1] = output
    return Grid((1, 512), (256,), seconds)


def times(speed: float, n_layer: int) -> DeviceTimes:
    return DeviceTimes(grid(1e-3 / speed, 0, n_layer), grid(1e-3 / speed, 5e-3 / speed, n_layer))


def setting(speeds: list[float], n_layer: int, link: LinkProfile) -> Setting:
    devices = [DeviceProfile(f"RPC{i}", 100 * s, 10 * s, 1e-4) for i, s in enumerate(speeds)]
    ways = itertools.permutations(range(len(speeds)), 2)
    cluster = ClusterProfile(tuple(devices), (link,) * len(speeds), dict.fromkeys(ways, link))
    return Setting(
        cluster,
        tuple(times(speed, n_layer) for speed in speeds),
        Traffic(2304, 2304, 4096, 8, 0.5, 0.5, 200_000),
        HeadTimes(2e-3, 2e-4, 1e-6, 5e-4, 1e-4),
        n_layer,
    )


def option(plan_setting: Setting, devices: int, break_even: int | None = 300) -> Option:
    """The first so many, with equal parts; the rest of the layers on the first."""
    placed = plan_setting.n_layer + 1
    counts = [placed // devices] * devices
    counts[0] += placed % devices
    return Option(tuple(range(devices)), tuple(counts), (), True, (), break_even)


def plan(
    speeds: list[float],
    *,
    link: LinkProfile = NEAR,
    break_even: int | None = 300,
    n_layer: int = 30,
) -> Plan:
    """All devices first, then fewer."""
    given = setting(speeds, n_layer, link)
    single = option(given, 1, 0)
    numbers = range(len(speeds), 0, -1)
    options = tuple(option(given, n, break_even) if n > 1 else single for n in numbers)
    names = tuple(device.name for device in given.cluster.devices)
    return Plan(given, names, single, options, options[0], (), "")


def told(path: Path) -> set[str]:
    """Every text in an SVG file."""
    ElementTree.parse(path)
    return set(re.findall(r"<!-- (.*?) -->", path.read_text(encoding="utf-8")))


WIDE = "W" * 60
LONG = "a-very-long-host-name.cluster.example.org:50052/RPC7"
CASES = {
    "one device": (plan([1]), 512),
    "two": (plan([1, 1]), 4096),
    "four, unequal": (plan([3, 1, 2, 0.5]), 2048),
    "seven": (plan([1] * 7), 1024),
    "sixteen": (plan([1] * 16, n_layer=80), 4096),
    "64": (plan([1] * 64, n_layer=80), 4096),
    "far": (plan([3, 0.2], link=FAR, break_even=None), 512),
    "late": (plan([1, 1, 1], break_even=3900), 300),
    "no single device": (replace(plan([1, 1, 1]), single=None), 1000),
    "the best is one device": (replace(plan([1, 1]), best=plan([1, 1]).single), 100),
    "long names": (replace(plan([1, 2]), names=(LONG, LONG[::-1])), 512),
    "wide names": (replace(plan([1, 2]), names=(WIDE, WIDE)), 512),
    "one token": (plan([1, 1]), 1),
}


@pytest.mark.parametrize("name", CASES)
def test_no_text_hides_another_or_leaves_the_picture(name, monkeypatch):
    given, n_prompt = CASES[name]
    found = curves(given, n_prompt)
    assert found is not None
    with canvas.defaults():
        from matplotlib.text import Text

        boxes, draw_text = {}, Text.draw

        def drawn(text: Text, *args: object) -> None:
            if text.get_text():
                boxes[text] = Text.get_window_extent(text)
            draw_text(text, *args)

        figure = compose(given, found, n_prompt, WIDE)
        monkeypatch.setattr(Text, "draw", drawn)
        figure.draw_without_rendering()
        page = figure.bbox
    assert boxes
    for text, box in boxes.items():
        assert page.x0 <= box.x0 and box.x1 <= page.x1, text
        assert page.y0 <= box.y0 and box.y1 <= page.y1, text
    for one, other in itertools.combinations(boxes, 2):
        # tight lines of tall letters touch
        shared = boxes[one].intersection(boxes[one], boxes[other])
        assert shared is None or shared.width <= 2 or shared.height <= 3, (one, other)


@pytest.mark.parametrize("name", ["two", "four, unequal", "sixteen", "far", "late", "one token"])
def test_the_break_even_is_written_where_it_hides_no_line(name):
    given, n_prompt = CASES[name]
    found = curves(given, n_prompt)
    assert found is not None
    with canvas.defaults():
        from matplotlib.text import Text

        axes = compose(given, found, n_prompt).axes[0]
        (label,) = (
            t for t in axes.texts if "break-even" in t.get_text() or "never" in t.get_text()
        )
        label.get_window_extent()
        # a dotted line behind it is still seen
        lines = [line for line in axes.lines if line.zorder]
        box, dots = Text.get_window_extent(label), _dots(lines)
    assert not np.any(np.all((dots > box.min) & (dots < box.max), axis=1))


def test_a_picture_tells_the_break_even_the_devices_and_their_layers(tmp_path):
    draw(plan([1, 1]), tmp_path / "a.svg", 1024, model="llama 7B Q4_0")
    words = told(tmp_path / "a.svg")
    assert "llama 7B Q4_0 on 2 devices" in words
    assert "Speed-up in time to first token against the best single device, RPC0" in words
    assert {"break-even: 300 tokens", "one device", "2 devices"} <= words
    assert {"64", "128", "256", "512", "1,024", "2,048", "4,096"} <= words
    assert {"RPC0", "layers 0-15", "RPC1", "layers 16-29 + output", "head"} <= words
    assert {"1", "2"} <= words


@pytest.mark.parametrize(
    ("break_even", "text"),
    [
        (None, "2 devices never ahead up to 4,096 tokens"),
        (0, "2 devices ahead at every length"),
        (64, "break-even: 64 tokens"),
        (4096, "break-even: 4,096 tokens"),
    ],
)
def test_every_break_even_is_told(tmp_path, break_even, text):
    draw(plan([1, 1], break_even=break_even), tmp_path / "a.svg", 1024)
    assert text in told(tmp_path / "a.svg")


def test_where_no_single_device_fits_the_speed_itself_is_shown(tmp_path):
    draw(replace(plan([1, 1]), single=None), tmp_path / "a.svg", 1024)
    words = told(tmp_path / "a.svg")
    assert "Prompt tokens a second until the first token; no single device holds the model" in words
    assert "one device" not in words
    assert not any("break-even" in word or "against" in word for word in words)


def test_a_png_is_one_and_wide_enough_to_print(tmp_path):
    draw(plan([1, 1]), tmp_path / "a.PNG", 1024)
    picture = (tmp_path / "a.PNG").read_bytes()
    assert picture.startswith(b"\x89PNG\r\n\x1a\n")
    assert int.from_bytes(picture[16:20], "big") == 1480


def test_the_same_plan_is_the_same_file_whatever_the_caller_has_set_up(tmp_path):
    draw(plan([1, 1]), tmp_path / "a.svg", 1024)
    import matplotlib

    with matplotlib.rc_context({"font.size": 20, "axes.grid": True, "svg.fonttype": "none"}):
        draw(plan([1, 1]), tmp_path / "b.svg", 1024)
        assert matplotlib.rcParams["font.size"] == 20
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


def test_strange_names_are_drawn_as_far_as_the_font_goes(tmp_path):
    given = replace(plan([1, 1]), names=("\u65e5\u672c $x$", "two\nlines"))
    draw(given, tmp_path / "a.svg", 512)
    assert {"?? $x$", "two?lines"} <= told(tmp_path / "a.svg")


# numbers


def test_there_is_one_line_for_each_number_of_devices_the_best_of_it():
    given = plan([1, 1, 1])
    worse = replace(given.options[1], devices=(1, 0))
    found = curves(replace(given, options=(*given.options, worse)), 512)
    assert found is not None
    assert [len(line.option.devices) for line in found.lines] == [2, 3]
    assert found.lines[0].option is given.options[1]
    assert found.shown is given.best
    assert found.lengths[0] == 64 and found.lengths[-1] == 4096
    assert {128, 300, 512, 513, 2048} <= set(found.lengths)


def test_few_lines_are_drawn_of_many_devices_and_the_best_among_them():
    given = plan([1] * 16)
    found = curves(replace(given, best=given.options[5]), 512)
    assert found is not None
    numbers = [len(line.option.devices) for line in found.lines]
    assert len(numbers) <= MOST
    assert {2, 11, 16} <= set(numbers)


def test_lengths_end_with_the_context():
    given = plan([1, 1])
    small = replace(given, setting=replace(given.setting, n_ctx=48))
    found = curves(small, 10)
    assert found is not None
    assert (found.lengths[0], found.lengths[-1]) == (6, 48)
    large = replace(given, setting=replace(given.setting, n_ctx=32_768))
    found = curves(large, 10_000)
    assert found is not None
    assert (found.lengths[0], found.lengths[-1]) == (64, 10_000)


def test_labels_are_moved_apart_and_stay_inside():
    assert _apart([1, 50, 80], 10, 100) == [1, 50, 80]
    assert _apart([50, 50, 52], 10, 100) == pytest.approx([50.67 - 10, 50.67, 50.67 + 10], abs=0.1)
    assert _apart([98, 99], 10, 100)[1] <= 100
    places = _apart([0, 0, 0, 30, 31, 60], 12, 100)
    assert all(b - a >= 11.99 for a, b in itertools.pairwise(places))


# failure


def test_another_suffix_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"a\.pdf: its name must end in \.png or \.svg"):
        draw(plan([1, 1]), tmp_path / "a.pdf", 512)
    with pytest.raises(UsageError, match=r"must end in \.png or \.svg"):
        check_path(tmp_path / "a")
    assert not list(tmp_path.iterdir())


def test_a_directory_that_is_not_there_is_told(tmp_path):
    with pytest.raises(UsageError, match=r"cannot write .*No such file or directory"):
        draw(plan([1, 1]), tmp_path / "none" / "a.png", 512)
    with pytest.raises(UsageError, match=r"cannot write .*No such file or directory"):
        check_path(tmp_path / "none" / "a.png")


def test_a_path_that_can_be_written_is_only_looked_at(tmp_path):
    check_path(tmp_path / "a.svg")
    assert not list(tmp_path.iterdir())


def test_a_directory_in_its_place_is_told(tmp_path):
    (tmp_path / "a.png").mkdir()
    with pytest.raises(UsageError, match=r"cannot write .*Is a directory"):
        draw(plan([1, 1]), tmp_path / "a.png", 512)


@pytest.mark.parametrize("n_prompt", [0, 4097])
def test_a_prompt_that_there_is_no_room_for_is_refused(tmp_path, n_prompt):
    with pytest.raises(UsageError, match=f"a prompt of {n_prompt} tokens in a context of 4096"):
        draw(plan([1, 1]), tmp_path / "a.png", n_prompt)


def test_a_plan_of_which_nothing_fits_is_refused(tmp_path):
    given = plan([1, 1])
    options = tuple(replace(option, fits=False) for option in given.options)
    with pytest.raises(UsageError, match="nothing to draw"):
        draw(replace(given, single=None, best=None, options=options), tmp_path / "a.png", 512)
    assert not list(tmp_path.iterdir())


def test_a_full_disk_leaves_what_was_there(tmp_path, monkeypatch):
    def full(*paths: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    path = tmp_path / "a.png"
    path.write_bytes(b"before")
    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(CaravanError, match=r"cannot write .*a\.png: No space left on device"):
        draw(plan([1, 1]), path, 512)
    assert path.read_bytes() == b"before"
    assert list(tmp_path.iterdir()) == [path]


# matplotlib


def test_matplotlib_is_imported_in_one_room_and_pyplot_nowhere():
    for path in ROOT.rglob("*.py"):
        for line, name in imports(path):
            if name.split(".")[0] == "matplotlib":
                assert path.parent == ROOT / "plan" / "picture", f"{path}:{line}"
                assert "pyplot" not in name, f"{path}:{line}"


def test_it_is_imported_only_to_draw_and_says_nothing_where_it_can_keep_nothing(tmp_path):
    """In a new process without a home, with a cache that is a file."""
    (tmp_path / "file").touch()
    code = (
        "import sys, os, caravan.plan.picture as picture\n"
        "assert 'matplotlib' not in sys.modules\n"
        "with picture.canvas.defaults():\n"
        "    assert 'matplotlib.pyplot' not in sys.modules\n"
        "assert 'matplotlib' in sys.modules and 'MPLCONFIGDIR' not in os.environ\n"
    )
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MPL")}
    environment = {**kept, "HOME": "/nowhere", "CARAVAN_CACHE": str(tmp_path / "file" / "in")}
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
