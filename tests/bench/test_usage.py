"""Shares from totals: whole, never more than one, told in every format that has room for them."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.fakes import HOST, FakeRig, result_of
from bench.test_session import QUICK, Session
from caravan.bench.output import make_printer
from caravan.bench.session import Settings
from caravan.bench.usage import Lap, Totals, Use, table, uses
from caravan.stream.telemetry import DeviceStats

ZERO = DeviceStats(0, 0, 0, 0, 0, 0, 0)
USE = Use(0.9, 0.05, 0.0123456, 0.0376544, 1000, 2000, 16)


def test_shares_are_of_the_time_of_all_repetitions() -> None:
    first = replace(ZERO, computing=500, waiting=100, bytes_in=30, graphs=4)
    between = replace(first, computing=10_000)  # such as a prompt that is not timed
    last = replace(between, computing=10_700, sending=50, bytes_in=50, bytes_out=8, graphs=8)
    laps = [Lap({"A": ZERO}, {"A": first}, 1000), Lap({"A": between}, {"A": last}, 1000)]
    found = uses(laps)["A"]
    assert found is not None
    assert (found.computing, found.waiting, found.sending) == (0.6, 0.05, 0.025)
    assert found.idle == pytest.approx(0.325)
    assert (found.bytes_in, found.bytes_out, found.graphs) == (25, 4, 4)


def test_what_nobody_counts_is_not_known() -> None:
    laps = [Lap({"A": ZERO, "B": None}, {"A": ZERO, "B": None}, 1000)]
    assert uses(laps)["B"] is None
    assert uses([Lap({"A": ZERO}, {}, 1000)]) == {"A": None}
    assert uses([]) == {}


ns = st.integers(0, 10**12)


@given(st.lists(st.tuples(ns, ns, ns, ns), min_size=1, max_size=4))
def test_shares_add_up_to_one(laps: list[tuple[int, int, int, int]]) -> None:
    totals: list[tuple[Totals, Totals]] = [
        ({"A": ZERO}, {"A": replace(ZERO, computing=c, waiting=w, sending=s)})
        for c, w, s, _ in laps
    ]
    found = uses([Lap(*two, lap[3]) for two, lap in zip(totals, laps, strict=True)])["A"]
    assert found is not None
    shares = (found.computing, found.waiting, found.sending, found.idle)
    assert all(0 <= share <= 1 for share in shares)
    assert sum(shares) == pytest.approx(1)


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_the_table_is_aligned_and_fits_a_terminal() -> None:
    lines = table(
        [
            ("pp512", 371.669, {"RPC0": USE, "RPC1": None}),
            ("pp512+tg128 @ d512", 9.1, {"RPC15": replace(USE, computing=1.0)}),
        ]
    )
    assert lines[0].split(" | ")[3:] == ["computing", "waiting", "sending", " idle |"]
    assert cells(lines[2]) == ["pp512", "371.67", "RPC0", "90.0 %", "5.0 %", "1.2 %", "3.8 %"]
    assert cells(lines[3]) == ["pp512", "371.67", "RPC1", "-", "-", "-", "-"]
    assert len({len(line) for line in lines}) == 1
    assert len(lines[0]) <= 80
    assert {tuple(n for n, c in enumerate(line) if c == "|") for line in lines[:1]} == {
        tuple(n for n, c in enumerate(line) if c == "|") for line in lines
    }


def printed(name: str) -> str:
    out = io.StringIO()
    printer = make_printer(name, out, HOST, set())
    assert printer is not None
    printer.header()
    printer.result(replace(result_of(), uses={"RPC0": USE, "RPC1": None}))
    printer.result(result_of())
    printer.footer()
    return out.getvalue()


def test_json_has_it_as_a_field_where_it_was_asked_for() -> None:
    first, second = json.loads(printed("json"))
    assert first["utilization"][0] == {
        "device": "RPC0",
        "computing": 0.9,
        "waiting": 0.05,
        "sending": 0.0123,
        "idle": 0.0377,
        "bytes_in": 1000,
        "bytes_out": 2000,
        "graphs": 16,
    }
    assert first["utilization"][1]["device"] == "RPC1"
    assert set(list(first["utilization"][1].values())[1:]) == {None}
    assert "utilization" not in second
    assert [json.loads(line) for line in printed("jsonl").splitlines()] == [first, second]


@pytest.mark.parametrize("name", ["csv", "sql"])
def test_llama_benchs_columns_stay_as_they_are(name: str) -> None:
    assert "utilization" not in printed(name)


def test_the_table_comes_between_the_results_and_the_build() -> None:
    blocks = printed("md").split("\n\n")
    assert [block.splitlines()[0].split()[0] for block in blocks] == [
        "|",
        "utilization:",
        "|",
        "build:",
    ]
    assert len(blocks[2].splitlines()) == 4


class BusyRig(FakeRig):
    """RPC0 has computed one graph more each time that it is asked, RPC1 is a llama.cpp server."""

    asked = 0

    def totals(self, case):
        self.asked += 1
        self.log.append("totals")
        return {"RPC0": replace(ZERO, graphs=self.asked), "RPC1": None}


def test_only_the_timed_part_counts_and_only_if_it_is_asked_for() -> None:
    for utilization in (False, True):
        session = Session(BusyRig())
        settings = Settings(run=QUICK, output="jsonl", utilization=utilization)
        session.run(settings, n_gen="0", n_depth="3")
        (row,) = [json.loads(line) for line in session.out.getvalue().splitlines()]
        log = session.rig.log
        if utilization:
            timed = log.index("totals"), len(log) - 1 - log[::-1].index("totals")
            assert log[timed[0] + 1 : timed[1]] == ["decode 4", "synchronize"]
            assert [use["graphs"] for use in row["utilization"]] == [1, None]
        else:
            assert "totals" not in log
            assert "utilization" not in row


def test_a_run_that_is_cut_short_tells_of_the_tests_before() -> None:
    session = Session(BusyRig())
    calls = iter(range(100))

    def fail_later() -> None:
        if next(calls) == 1:
            raise KeyboardInterrupt

    session.rig.on_decode = fail_later
    with pytest.raises(KeyboardInterrupt):
        session.run(Settings(run=QUICK, utilization=True))
    last = session.out.getvalue().splitlines()[-1]
    assert (cells(last)[0], cells(last)[2]) == ("pp4", "RPC1")
