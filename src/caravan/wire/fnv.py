"""FNV-1a with 64 bits, the hash of SET_TENSOR_HASH, vectorised: `fnv1a_64`.

A step is `h = (h ^ byte) * PRIME`. Cut the data into runs and take all of them at once, a byte of
each at a step. That needs the state in which each run starts, and two facts give it:

- The XOR changes the low 8 bits alone, so two states with the same low byte stay `PRIME**n` times
  their difference apart. A run can start from its low byte alone; the rest is added afterwards.
- The low byte lives by itself, and as PRIME is odd, bit k of what comes out of a run is bit k of
  what went in, XOR something that only the lower bits and the data decide. So eight passes over the
  data as bytes find the low bytes, a bit at a time, each for all runs with one prefix XOR.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

BASIS = 0xCBF29CE484222325
PRIME = 0x100000001B3

# Short runs cost little to transpose; a block of them stays in the processor's cache.
_RUN = 32
_RUNS = 1 << 15
# Below this, the calls of the vectorised way cost more than one byte after the other.
_SMALL = 4 << 10
_MASK = (1 << 64) - 1

_Bytes = npt.NDArray[np.uint8]
_Words = npt.NDArray[np.uint64]


def fnv1a_64(data: bytes | bytearray | memoryview, state: int = BASIS) -> int:
    """The hash of `data` (one dimension of bytes) after what has the hash `state`.

    Hundreds of megabytes a second, mostly without the GIL; needs about two megabytes meanwhile.
    """
    size = len(data)
    at = 0
    while size - at >= _SMALL:
        runs = min(_RUNS, (size - at) // _RUN)
        block = np.frombuffer(data, np.uint8, runs * _RUN, at)
        state = _block(np.ascontiguousarray(block.reshape(runs, _RUN).T), state)
        at += runs * _RUN
    for byte in memoryview(data)[at:]:
        state = (state ^ byte) * PRIME & _MASK
    return state


def _block(steps: _Bytes, state: int) -> int:
    """The state after all runs; `steps[i]` has byte i of each."""
    low = _low_bytes(steps, state & 0xFF)
    ends = low.astype(np.uint64)
    prime = np.uint64(PRIME)
    for step in steps:
        np.bitwise_xor(ends, step, ends)
        np.multiply(ends, prime, ends)
    # From the state s before a run to the one after it: ends + (s - low) * power.
    power = pow(PRIME, len(steps), 1 << 64)
    ends -= low * np.uint64(power)
    rest = int(np.multiply(ends, _powers(power, len(ends))).sum())
    return (state * pow(power, len(ends), 1 << 64) + rest) & _MASK


def _low_bytes(steps: _Bytes, first: int) -> _Bytes:
    """The low byte of the state before each run, given that before the first one."""
    low = np.zeros(steps.shape[1], np.uint8)
    now = np.empty_like(low)
    factor = np.uint8(PRIME & 0xFF)
    for bit in range(8):
        now[:] = low
        for step in steps:
            np.bitwise_xor(now, step, now)
            np.multiply(now, factor, now)
        # What each run does to this bit, had it been 0 before; the first entry is what it was.
        flips = (now >> bit) & 1
        flips[1:] = flips[:-1]
        flips[0] = (first >> bit) & 1
        low |= np.bitwise_xor.accumulate(flips) << bit
    return low


@lru_cache(maxsize=2)
def _powers(base: int, n: int) -> _Words:
    """base**(n - 1) ... base**0, modulo 2**64."""
    factors = np.full(n, base, np.uint64)
    factors[0] = 1
    return np.multiply.accumulate(factors)[::-1]
