"""That the rules are needed: what kernels do without them. Only with CARAVAN_TEST_UNCHECKED set."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent.parent
# a part of a name in the corpus, and what comes of it
SAMPLE = {
    "MUL_MAT 2:": "SIGFPE",
    "MUL_MAT 3:": "SIGSEGV",
    "MUL_MAT by Hadamard 0:": "bytes outside",
    "GET_ROWS of half 0:": "bytes outside",
    "ADD to blocks 1:": "bytes outside",
    "CONT 1:": "bytes outside",
    "ROPE in sections 0:": "SIGFPE",
    "UNARY silu 0:": "SIGABRT",
    "IM2COL_3D 0:": "SIGFPE",
    "POOL_2D 1:": "bytes outside",
    "SSM_SCAN 6:": "SIGSEGV",
    "RWKV_WKV6 3:": "bytes outside",
}


@pytest.mark.skipif("CARAVAN_TEST_UNCHECKED" not in os.environ, reason="crashes processes")
@pytest.mark.parametrize("name", SAMPLE)
def test_kernels_go_wrong_without_the_rule(name) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "worker.unchecked", name],
        cwd=TESTS,
        capture_output=True,
        text=True,
        timeout=50,
    )
    first = done.stdout.splitlines()[0]
    assert SAMPLE[name] in first and name in first, done
