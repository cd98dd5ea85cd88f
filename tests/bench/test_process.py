"""--prio and --cpu-mask, checked in a child so that the test process keeps its own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from caravan.bench.process import set_cpu_mask, set_priority
from caravan.errors import CaravanError


def run(code: str) -> str:
    head = "import os; from caravan.bench.process import set_cpu_mask, set_priority; "
    return subprocess.run(
        [sys.executable, "-c", head + code], check=True, capture_output=True, text=True
    ).stdout.strip()


def test_defaults_change_nothing() -> None:
    set_priority(0)
    set_cpu_mask("0x0")


@pytest.mark.skipif(not hasattr(os, "setpriority"), reason="POSIX only")
def test_low_priority() -> None:
    assert run("n = os.nice(0); set_priority(-1); print(os.nice(0) - n)") in ("5", "0")


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="Linux only")
def test_cpu_mask() -> None:
    cpu = min(os.sched_getaffinity(0))
    mask = hex(1 << cpu)
    assert run(f"set_cpu_mask('{mask}'); print(os.sched_getaffinity(0))") == f"{{{cpu}}}"
    with pytest.raises(CaravanError, match="names no CPU"):
        set_cpu_mask("0x" + "8" + "0" * 100)
