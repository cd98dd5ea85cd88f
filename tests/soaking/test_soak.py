"""The short form of `benchmarks/soak.py`."""

from __future__ import annotations

from soaking.driver import Soak


def test_random_heads_leave_nothing_behind(tmp_path):
    soak = Soak(tmp_path, seed=1, heads=3, pause=0.2)
    try:
        soak.run(9.0)
    finally:
        soak.close()
    assert soak.faults == []
    assert soak.done
    # what a run as short as this can tell: no session's worth of memory for each session
    assert soak.growth(3.0) < 0.25, [sample.resident for sample in soak.samples]
