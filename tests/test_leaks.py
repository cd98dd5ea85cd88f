"""The leak check itself: a leak fails the test that left it, and nothing else does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

THREAD = """
import threading, time
def test_leaves_a_thread():
    threading.Thread(target=time.sleep, args=(30,), name="left-behind", daemon=True).start()
"""

CHILD = """
import atexit, subprocess, sys
def test_leaves_a_child():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(30)"])
    atexit.register(child.wait)
    atexit.register(child.kill)
"""

CLEAN = """
import subprocess, sys, threading
def test_leaves_nothing():
    thread = threading.Thread(target=print)
    thread.start()
    thread.join()
    subprocess.run([sys.executable, "-c", ""], check=True)
"""


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        (THREAD, "threads left running: ['left-behind']"),
        pytest.param(
            CHILD,
            "child processes left: [",
            marks=pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
        ),
        (CLEAN, "1 passed"),
    ],
)
def test_what_a_test_leaves_is_told(body, complaint, tmp_path):
    (tmp_path / "test_inner.py").write_text(body)
    command = [sys.executable, "-m", "pytest", "-p", "leaks", "-p", "no:cacheprovider", "-q"]
    done = subprocess.run(
        [*command, str(tmp_path)],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(Path(__file__).parent), "PATH": ""},
    )
    assert complaint in done.stdout
    assert done.returncode == (0 if body is CLEAN else 1)
