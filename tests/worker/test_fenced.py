"""A short run of `worker.fenced`: what passes the checks stays within its memory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parent.parent
# longer ones: CARAVAN_TEST_FENCED=20000
ROUNDS = int(os.environ.get("CARAVAN_TEST_FENCED", "250"))


def test_changed_graphs_are_refused_or_stay_within_their_memory() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "worker.fenced", "--rounds", str(ROUNDS)],
        cwd=TESTS,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "'computed'" in done.stdout
