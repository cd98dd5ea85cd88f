"""`log`: one line on stderr for the person who runs the worker, from any of its processes."""

from __future__ import annotations

import contextlib
import sys


def log(text: str) -> None:
    """Nobody may be reading, and a file may have no room for it: that fails nothing else."""
    with contextlib.suppress(OSError, ValueError):
        print(f"caravan worker: {text}", file=sys.stderr, flush=True)
