"""How many threads to compute with on this machine when nobody says: llama.cpp's "math cores".

One for each physical core, without a hybrid CPU's small ones, and never more than the CPUs that
this process may use.
"""

from __future__ import annotations

import os
from pathlib import Path

_SYS = Path("/sys/devices")


def physical_cores(sys_devices: Path = _SYS) -> int:
    """The number of cores worth a compute thread; at least 1."""
    logical = os.cpu_count() or 1
    # where the system does not say: above four, two logical CPUs to a core
    cores = _big_cores(sys_devices) or (logical if logical <= 4 else logical // 2)
    if hasattr(os, "sched_getaffinity"):
        cores = min(cores, len(os.sched_getaffinity(0)))
    return cores


def share_of_cores(cores: int, workers: int) -> int:
    """Threads for each of several workers on this machine: with more they would wait for cores."""
    return max(1, cores // workers)


def _big_cores(sys_devices: Path) -> int:
    """Linux lists the siblings of every CPU, and which CPUs of a hybrid are the big ones."""
    big: set[int] | None
    try:
        big = _cpu_list((sys_devices / "cpu_core/cpus").read_text())
    except (OSError, ValueError):
        big = None
    siblings = set()
    for file in (sys_devices / "system/cpu").glob("cpu[0-9]*/topology/thread_siblings"):
        number = int(file.parent.parent.name[3:])
        if big is None or number in big:
            siblings.add(file.read_text().strip())
    return len(siblings)


def _cpu_list(text: str) -> set[int]:
    """`0-3,8` as a set."""
    cpus: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return cpus
