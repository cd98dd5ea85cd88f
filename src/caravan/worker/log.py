"""`log`: one line on stderr for the person who runs the worker, from any of its processes."""

from __future__ import annotations

import contextlib
import sys


def log(text: str) -> None:
    """Nobody may be reading."""
    with contextlib.suppress(BrokenPipeError):
        print(f"caravan worker: {text}", file=sys.stderr, flush=True)
