"""A pytest plugin: a test that leaves a thread or a child process behind fails.

Compares what runs before and after each test. What fixtures of a wider scope keep running is set up
before the comparison begins, so it does not count.
"""

from __future__ import annotations

import multiprocessing.resource_tracker
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

# Ends take a moment: a closed socket wakes its thread, a signalled child is reaped.
_GRACE_SECONDS = 2.0


@pytest.fixture(autouse=True)
def no_leaks() -> Iterator[None]:
    threads = set(threading.enumerate())
    children = _children()
    yield
    left = _wait_for_none(lambda: [t for t in threading.enumerate() if t not in threads])
    assert not left, f"threads left running: {[thread.name for thread in left]}"
    alive = _wait_for_none(lambda: sorted(_children() - children - _trackers()))
    assert not alive, f"child processes left: {[_describe(pid) for pid in alive]}"


def _wait_for_none(remaining: Callable[[], list]) -> list:
    deadline = time.monotonic() + _GRACE_SECONDS
    while (left := remaining()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return left


def _children() -> set[int]:
    """The ids of this process's children, ended but unreaped ones too."""
    found: set[int] = set()
    for task in Path("/proc/self/task").glob("*/children"):
        try:
            found.update(int(pid) for pid in task.read_text().split())
        except OSError:
            continue
    return found


def _trackers() -> set[int]:
    # multiprocessing keeps this helper for the life of the process; it is not a leak.
    pid = getattr(multiprocessing.resource_tracker._resource_tracker, "_pid", None)
    return set() if pid is None else {pid}


def _describe(pid: int) -> str:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return str(pid)
    return f"{pid} {command.strip() or '(ended, not waited for)'}"


def running(pid: int) -> bool:
    """Is there still a process of that id?"""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
