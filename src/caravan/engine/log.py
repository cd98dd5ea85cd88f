"""The engine's log lines: dropped, printed, or remembered for an error message.

The callback is native code's only way in here; it takes any thread, raises nothing and keeps a few
error lines, which say why a model or a context was refused.
"""

from __future__ import annotations

import atexit
import ctypes
import sys
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from caravan.engine.llama import LogCallback

_WARN, _ERROR, _CONT = 3, 4, 5
_KEPT = 20

_verbose = False
_errors: deque[str] = deque(maxlen=_KEPT)
_last_level = 0
_muted = threading.local()


def _on_line(level: int, text: bytes | None, data: Any) -> None:
    global _last_level
    try:
        line = (text or b"").decode("utf-8", "replace")
        if level != _CONT:
            _last_level = level
        if _verbose and not getattr(_muted, "on", False):
            sys.stderr.write(line)
        if _last_level == _ERROR and line.strip():
            _errors.append(line.strip())
    except BaseException:  # nothing may reach C
        return


_callback = LogCallback(_on_line)


def install(llama: Any) -> None:
    """Send llama's and ggml's log lines here, for as long as Python can take them."""
    llama.log_set(_callback, None)
    atexit.register(_uninstall, llama)


def _uninstall(llama: Any) -> None:
    # The engine's own destructors may log after the interpreter is gone: they get a native function
    # that ignores its arguments and does nothing.
    nothing = ctypes.cast(ctypes.pythonapi.Py_IsInitialized, ctypes.c_void_p)
    llama.log_set(nothing, None)


def set_verbose(on: bool) -> None:
    """Whether every log line of the engine goes to stderr."""
    global _verbose
    _verbose = on


@contextmanager
def muted() -> Iterator[None]:
    """Inside, the lines of this thread are not printed, whatever `set_verbose` says."""
    before = getattr(_muted, "on", False)
    _muted.on = True
    try:
        yield
    finally:
        _muted.on = before


def recent_errors() -> list[str]:
    """The last error lines, oldest first."""
    return list(_errors)


def forget_errors() -> None:
    """Before a call whose errors are of interest."""
    _errors.clear()
