"""Priority and CPUs of this process, for `--prio` and `--cpu-mask`.

Set before the engine's compute threads exist, which inherit both.
"""

from __future__ import annotations

import os

from caravan.errors import CaravanError, UsageError

# Nice values that llama.cpp's tools use for the same words.
_NICE = {-1: 5, 0: 0, 1: -5, 2: -10, 3: -20}


def set_priority(priority: int) -> None:
    """Raise or lower this process; workers started later inherit it. 0 changes nothing."""
    if priority == 0:
        return
    setpriority = getattr(os, "setpriority", None)
    if setpriority is None:
        raise UsageError(f"--prio {priority} is not supported yet on this system")
    try:
        setpriority(os.PRIO_PROCESS, 0, _NICE[priority])
    except OSError as exc:
        raise CaravanError(f"--prio {priority}: the system refuses: {exc.strerror}") from exc


def set_cpu_mask(mask: str) -> None:
    """Bind this thread, and all that it starts from now on, to the CPUs of a mask; 0 to none."""
    bits = int(mask, 16)
    if bits == 0:
        return
    setaffinity = getattr(os, "sched_setaffinity", None)
    if setaffinity is None:
        raise UsageError("--cpu-mask is not supported yet on this system")
    try:
        setaffinity(0, {cpu for cpu in range(bits.bit_length()) if bits >> cpu & 1})
    except OSError as exc:
        raise CaravanError(f"--cpu-mask {mask} names no CPU of this machine") from exc
