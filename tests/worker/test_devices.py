"""What `-d` may say, and which devices that gives."""

from __future__ import annotations

import pytest

from caravan.errors import UsageError, WorkerStartError
from caravan.worker.devices import Chosen, Found, Wish, choose, parse
from caravan.worker.speed import Speed

CPU = Found(1, "CPU", "a processor", 0)
GPU = Found(2, "CUDA0", "a card", 1)
SLOW, FAST = Speed(100, 50), Speed(2000, 400, gib=24, us=20)


@pytest.mark.parametrize(
    ("text", "wishes"),
    [
        ("CPU", [Wish("CPU")]),
        ("CPU:1,CPU:2", [Wish("CPU", 1), Wish("CPU", 2)]),
        ("CPU:1/CUDA0", [Wish("CPU", 1), Wish("CUDA0")]),
        ("sim:GFLOPS=100,GBPS=50", [Wish("sim", speed=SLOW)]),
        ("sim:GBPS=50/GFLOPS=1e2", [Wish("sim", speed=SLOW)]),
        ("CPU:1,sim:GFLOPS=100,GBPS=50", [Wish("CPU", 1), Wish("sim", speed=SLOW)]),
        (
            "sim:GFLOPS=100,GBPS=50,sim:GFLOPS=2000,GBPS=400,GIB=24,US=20/CPU:3",
            [Wish("sim", speed=SLOW), Wish("sim", speed=FAST), Wish("CPU", 3)],
        ),
        (" sim:GFLOPS=100 , GBPS=50 ", [Wish("sim", speed=SLOW)]),
    ],
)
def test_entries_are_parsed(text, wishes):
    assert parse(text) == wishes


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("CPU,,CPU", "empty entry"),
        ("CPU:0", "threads must be"),
        ("CPU:x", "threads must be"),
        (":1", "no name"),
        ("sim", "needs GFLOPS and GBPS"),
        ("sim:", "needs GFLOPS and GBPS"),
        ("sim:GFLOPS=1", "needs GBPS"),
        ("sim:GFLOPS=1,CPU,GBPS=1", "does not follow a sim device"),
        ("GBPS=1", "does not follow a sim device"),
        ("CPU:1,GBPS=1", "does not follow a sim device"),
        ("sim:GFLOPS=1,GBPS=1,WATTS=3", "has no 'WATTS'"),
        ("sim:GFLOPS=1,GBPS=1,GBPS=2", "given twice"),
        ("sim:GFLOPS=0,GBPS=1", "GFLOPS=0 is not a number"),
        ("sim:GFLOPS=1,GBPS=-1", "GBPS=-1 is not a number"),
        ("sim:GFLOPS=nan,GBPS=1", "GFLOPS=nan is not a number"),
        ("sim:GFLOPS=inf,GBPS=1", "GFLOPS=inf is not a number"),
        ("sim:GFLOPS=,GBPS=1", "GFLOPS= is not a number"),
        ("sim:GFLOPS=1,GBPS=1,GIB=0", "GIB=0 is not a number"),
        ("sim:GFLOPS=1,GBPS=1,GIB=1e9", "GIB=1e9 is not a number"),
        ("sim:GFLOPS=1,GBPS=1,US=-1", "US=-1 is not a number"),
        ("sim:GFLOPS=1,GBPS=1,US=1e30", r"US=1e30 is not a number .*\(0 to 1e\+09\)"),
        ("sim:GFLOPS=1e-300,GBPS=1", "GFLOPS=1e-300 is not a number"),
        (",".join(["CPU"] * 17), "17 devices are more than 16"),
    ],
)
def test_nonsense_is_refused_with_its_reason(text, why):
    with pytest.raises(UsageError, match=why):
        parse(text)


def test_devices_are_found_by_name_and_simulated_ones_stand_on_the_cpu():
    wishes = parse("CUDA0,sim:GFLOPS=100,GBPS=50,CPU:2,CPU")
    assert choose(wishes, [CPU, GPU], 4) == [
        Chosen(GPU, 4),
        Chosen(CPU, 0, SLOW),
        Chosen(CPU, 2),
        Chosen(CPU, 4),
    ]


def test_without_wishes_the_gpus_are_lent_and_the_cpu_where_there_are_none():
    assert choose([], [CPU, GPU], 4) == [Chosen(GPU, 4)]
    assert choose([], [CPU], 4) == [Chosen(CPU, 4)]


@pytest.mark.parametrize(
    ("wishes", "found", "why"),
    [
        ("CUDA1", [CPU, GPU], "unknown device 'CUDA1'; available devices: CPU"),
        ("CUDA0:2", [CPU, GPU], "takes no number of threads"),
        ("sim:GFLOPS=1,GBPS=1", [GPU], "no CPU device to simulate"),
    ],
)
def test_what_is_not_there_is_refused(wishes, found, why):
    with pytest.raises(WorkerStartError, match=why):
        choose(parse(wishes), found, 1)
    with pytest.raises(WorkerStartError, match="No devices found"):
        choose([], [], 1)
