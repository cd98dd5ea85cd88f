"""The table of a plan in 80 columns, its JSON, and what the command refuses."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from caravan.cli import plan_table as table
from caravan.cli.main import main
from caravan.cli.plan_record import record
from caravan.llm.needs import DeviceNeeds
from caravan.llm.params import ContextParams
from caravan.plan.options import Option, Plan, Speed
from caravan.plan.pipeline import HeadTimes, Setting, Traffic
from caravan.plan.profile import ClusterProfile, DeviceProfile, LinkProfile
from caravan.plan.times import DeviceTimes, Grid
from caravan.plan.verify import Check

GIB = 1 << 30


def speed(prompt: int, concurrency: int = 1, factor: float = 1.5) -> Speed:
    return Speed(prompt, concurrency, 1234.5 * factor, 61.07, 0.0421 * prompt, factor, 0.95)


def needs(name: str, lacks: int = 0) -> DeviceNeeds:
    return DeviceNeeds(name, "lab:1", 11 * GIB, GIB, GIB, 13 * GIB - lacks, 24 * GIB)


def option(
    devices: tuple[int, ...],
    counts: tuple[int, ...],
    speeds: tuple[Speed, ...] = (speed(512), speed(4096)),
    *,
    lacks: int = 0,
    break_even: int | None = 260,
) -> Option:
    needed = tuple(needs(f"RPC{n}", lacks) for n in devices)
    return Option(devices, counts, needed, not lacks, speeds, break_even)


def plan(*options: Option, count: int = 2) -> Plan:
    names = tuple(f"RPC{n}" for n in range(count))
    grid = Grid((1,), (256,), np.ones((1, 1, 31)))
    cluster = ClusterProfile(
        tuple(DeviceProfile(name, 50.0, 10.0, memory_free=GIB) for name in names),
        (LinkProfile(),) * count,
        {(0, 1): LinkProfile(1e-4, math.inf)},
    )
    setting = Setting(
        cluster,
        (DeviceTimes(grid, grid),) * count,
        Traffic(1, 1, 1, 1, 1, 1, 1),
        HeadTimes(1e-3, 0, 0, 0, 0),
        30,
    )
    fitting = [o for o in options if o.fits]
    single = next((o for o in fitting if len(o.devices) == 1), None)
    advice = "Split it: two devices read a prompt of 4096 tokens 1.5 times as fast as RPC0 alone."
    best = fitting[0] if fitting else None
    return Plan(setting, names, single, options, best, ((64, 0.8), (512, math.nan)), advice)


def test_the_table():
    found = plan(
        option((0, 1), (20, 11)),
        option((0,), (31,), (speed(512, factor=1.0), speed(4096, factor=1.0)), break_even=None),
        option((1,), (31,), (), lacks=GIB * 3 // 2, break_even=None),
    )
    assert table.told(found, 8, 80) == [
        "Split it: two devices read a prompt of 4096 tokens 1.5 times as fast as RPC0",
        "alone.",
        "",
        "DEVICES    LAYERS  PROMPT  PP t/s         TG t/s            TTFT",
        "RPC0/RPC1  20/11      512    1852  1.50x    61.1  0.95x   21.6 s",
        "                     4096    1852  1.50x    61.1  0.95x  2.9 min",
        "RPC0       31         512    1234  1.00x    61.1  0.95x   21.6 s",
        "                     4096    1234  1.00x    61.1  0.95x  2.9 min",
        "RPC1       31      does not fit: RPC1 lacks 1.5 GiB",
        "",
        "MEMORY   WEIGHTS  KV CACHE  COMPUTE       ALL      FREE",
        "RPC0    11.0 GiB   1.0 GiB  1.0 GiB  13.0 GiB  13.0 GiB",
        "RPC1    11.0 GiB   1.0 GiB  1.0 GiB  13.0 GiB  13.0 GiB",
        "",
        "PP and TG: tokens of prompts and answers a second, of all requests together. x:",
        "times as fast as RPC0 alone. RPC0/RPC1: sooner with the first token than RPC0",
        "alone from prompts of 260 tokens on.",
    ]


def test_long_lists_of_devices_go_on_below(width=80):
    order = (0, 2, 1, 3, 4, 5, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14)
    layers = (3, 4, 5, 4, 4, 5, 6, 5, 6, 5, 6, 5, 6, 5, 6, 6)
    speeds = tuple(speed(n, c) for c in (1, 16) for n in (512, 16384))
    lines = table.choices(plan(count=16), [option(order, layers, speeds)], width)
    assert max(map(len, lines)) <= width
    assert len(lines) > 1 + len(speeds)
    shown = "".join(line.split()[0] for line in lines[1:])
    assert shown.startswith("RPC0/RPC2/RPC1/RPC3…RPC5/RPC7/RPC6/")
    assert shown.endswith("/RPC15/RPC14")


def test_what_is_left_out_is_told():
    options = [option((n,), (31,)) for n in range(11)]
    # another order of the same devices is not shown
    found = plan(option((0, 1), (16, 15)), option((1, 0), (15, 16)), *options[1:], count=11)
    assert "… and 3 more (--top 11 shows all)" in table.told(found, 8, 80)
    assert not any("more" in line for line in table.told(found, 11, 80))


def test_nothing_fits():
    found = plan(option((0,), (31,), (), lacks=GIB))
    lines = table.told(found, 8, 80)
    assert "RPC0     31      does not fit: RPC0 lacks 1.0 GiB" in lines
    assert not any(line.startswith("MEMORY") for line in lines)


@pytest.mark.parametrize(
    ("break_even", "words"),
    [
        (None, "never sooner with the first token than RPC0 alone, up to 4096 tokens."),
        (0, "always sooner with the first token than RPC0 alone."),
        (99, "sooner with the first token than RPC0 alone from prompts of 99 tokens on"),
    ],
)
def test_the_break_even_is_told(break_even, words):
    found = plan(option((0,), (31,)), option((0, 1), (20, 11), break_even=break_even))
    assert f"RPC0/RPC1: {words}" in " ".join(table.told(found, 8, 80))


def test_names_and_counts_are_short():
    assert table.names(["RPC0", "RPC1"]) == "RPC0/RPC1"
    assert table.names(["RPC8", "RPC9", "RPC10", "CPU"]) == "RPC8…RPC10/CPU"
    assert table.names(["big", "big", "big"]) == "big/big/big"
    assert table.names(["a3", "a2", "a1", "a2", "a3", "a4"]) == "a3…a1/a2…a4"
    assert table.names(["a1", "b2", "a3", "a5"]) == "a1/b2/a3/a5"
    assert table.counts([5, 5, 5, 6, 6]) == "3x5/6/6"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0004, "0 ms"),
        (0.9994, "999 ms"),
        (0.9996, "1.00 s"),
        (9.994, "9.99 s"),
        (9.996, "10.0 s"),
        (99.96, "1.7 min"),
        (math.nan, "-"),
    ],
)
def test_seconds(seconds, text):
    assert table.seconds(seconds) == text


def test_rates():
    assert [table.rate(value) for value in (9.96, 999.94, 999.96, math.nan)] == [
        "10.0", "999.9", "1000", "-",
    ]  # fmt: skip
    assert table.factor(math.nan) == "-"


def test_what_was_verified():
    checks = [
        Check(("RPC0", "RPC1"), (20, 11), "prompt", 512, 430.0, 400.0),
        Check(("RPC0", "RPC1"), (20, 11), "decode", 512, 48.0, 50.0),
        Check(("RPC0",), (31,), "prompt", 512, 250.0, 250.0),
        Check(("RPC0", "RPC1"), (20, 11), "break-even", 0, 640.0, math.nan),
    ]
    assert table.checked(checks) == [
        "VERIFIED   LAYERS                     PREDICTED   MEASURED   ERROR",
        "RPC0/RPC1  20/11   prompt of 512      430.0 t/s  400.0 t/s  +7.5 %",
        "                   answer after 512    48.0 t/s   50.0 t/s  -4.0 %",
        "RPC0       31      prompt of 512      250.0 t/s  250.0 t/s  +0.0 %",
        "RPC0/RPC1  20/11   break-even        640 tokens          -       -",
        "",
        "Error of all speeds: median 4.0 %, worst 7.5 %.",
    ]


class Work:
    """What is asked of a ModelWork."""

    def layer_work(self, n_tokens: int, n_kv: int, kind: str = "prompt") -> list[float]:
        return [float(n_tokens)] * 31


def test_json_has_everything_and_no_infinity(tmp_path):
    found = plan(option((0, 1), (20, 11)), option((0,), (31,), (speed(512, factor=math.nan),)))
    check = Check(("RPC0",), (31,), "prompt", 512, 250.0, 250.0)
    made = record(tmp_path / "m.gguf", ContextParams(), found, Work(), [], [check])
    read = json.loads(json.dumps(made, allow_nan=False))
    assert read["devices"][0]["name"] == "RPC0"
    assert np.shape(read["devices"][1]["times"]["prompt"]["seconds"]) == (1, 1, 31)
    assert read["links"] == [
        {"source": "RPC0", "target": "RPC1", "seconds": 1e-4, "rate": None, "way": "direct"}
    ]
    assert read["best"]["devices"] == ["RPC0", "RPC1"]
    assert read["options"][1]["speeds"][0]["speedup_pp"] is None
    assert read["curve"][1] == {"prompt": 512, "speedup": None}
    assert read["work"]["prompt"] == {"n_tokens": 512, "n_kv": 4096, "layers": [512.0] * 31}
    assert read["verified"][0]["error"] == 0.0


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--prompt", "512,x"), "'512,x' is no list of numbers such as 512,4096"),
        (("--prompt", "0"), "'0' is no list of numbers"),
        (("--prompt", "1" * 5000), "is no list of numbers"),
        (("--concurrency", ""), "'' is no list of numbers"),
        (("-c", "600"), "a prompt of 4096 tokens and 128 more do not fit into a context of 600"),
        (("--cluster", "x.json", "--rpc", "a"), "--cluster describes all devices"),
        (("--cluster", "x.json", "--verify"), "--verify needs devices that are there"),
    ],
)
def test_wrong_usage(words, told, capsys):
    assert main(["plan", "-m", "smollm2", *words]) == 2
    assert told in capsys.readouterr().err


def test_a_picture_that_cannot_be_drawn_is_refused_before_anything(tmp_path, capsys, monkeypatch):
    assert main(["plan", "-m", "nowhere", "--plot", str(tmp_path / "x.pdf")]) == 2
    assert "must end in .png or .svg" in capsys.readouterr().err
    monkeypatch.setattr("caravan.cli.plan.find_spec", lambda name: None)
    assert main(["plan", "-m", "nowhere", "--plot", str(tmp_path / "x.png")]) == 2
    assert "--plot needs matplotlib" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_without_devices_there_is_nothing_to_plan(smollm2, capsys, monkeypatch):
    monkeypatch.delenv("CARAVAN_RPC", raising=False)
    monkeypatch.delenv("LLAMA_ARG_RPC", raising=False)
    assert main(["plan", "-m", str(smollm2)]) == 2
    assert "no devices to plan for" in capsys.readouterr().err
