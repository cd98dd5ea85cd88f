"""What was measured of devices, kept in the user's cache: `profiles/`, a JSON file for each device.

A file is written whole or not at all. One that is damaged, or that speaks of another device, is as
if it were not there, and so is a directory that cannot be read or written. Nothing here measures.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from caravan.models.cache import profiles_dir
from caravan.plan.layers import ClassTimes
from caravan.plan.profile import DeviceProfile
from caravan.plan.times import F64

# of what is in a file and of how it was measured
_VERSION = 1
_MOST_BYTES = 16 << 20
# Classes of layers that are kept of one device, the newest ones.
_MOST_CLASSES = 256
_MOST = 1e18  # of a speed or a time
_SPEEDS = ("gflops", "gbps", "graph", "turn", "check", "check_graph")


@dataclass(frozen=True, slots=True)
class Identity:
    """What must be the same for what was measured to hold.

    Attributes:
        endpoint: of its worker, or the machine that it is on.
        description, threads, engine: as the worker says.
        memory_total: bytes.
    """

    endpoint: str
    description: str
    threads: int
    engine: str
    memory_total: int


class Store:
    """What is known of one device.

    Args:
        directory: `profiles_dir()` if it is None.
    """

    def __init__(self, identity: Identity, directory: Path | None = None) -> None:
        self._identity = {"version": _VERSION, **asdict(identity)}
        name = sha256(json.dumps(self._identity).encode()).hexdigest()[:32]
        self._path = (directory or profiles_dir()) / f"{name}.json"

    def __repr__(self) -> str:
        return f"<Store {self._path}>"

    def profile(self, device: DeviceProfile) -> DeviceProfile | None:
        """The device with the speeds that were measured; None where nothing is known."""
        found = self._read().get("profile")
        if not isinstance(found, dict):
            return None
        speeds = {name: _number(found.get(name)) for name in _SPEEDS}
        if any(value is None for value in speeds.values()) or not speeds["gflops"]:
            return None
        given = {**asdict(device), **speeds}
        return DeviceProfile(**given) if speeds["gbps"] else None

    def keep_profile(self, device: DeviceProfile) -> None:
        """In the place of what was known; the layers' times go."""
        speeds = {name: getattr(device, name) for name in _SPEEDS}
        self._write({"profile": speeds})

    def classes(
        self, signatures: Sequence[str], shapes: tuple[tuple[int, ...], tuple[int, ...]]
    ) -> dict[str, ClassTimes]:
        """The times that are known, by the signatures of the layers.

        Args:
            shapes: that the arrays for prompt and decode must have.
        """
        kept = self._read().get("layers")
        if not isinstance(kept, dict):
            return {}
        found = {}
        for signature in signatures:
            entry = kept.get(signature)
            if not isinstance(entry, dict):
                continue
            prompt = _array(entry.get("prompt"), shapes[0])
            decode = _array(entry.get("decode"), shapes[1])
            if prompt is not None and decode is not None:
                found[signature] = ClassTimes(prompt, decode)
        return found

    def keep_classes(self, found: Mapping[str, ClassTimes]) -> None:
        """Beside those that are there; what was computed instead of measured is left out."""
        data = self._read()
        kept = data.get("layers")
        layers = dict(kept) if isinstance(kept, dict) else {}
        for signature, times in found.items():
            if times.measured:
                layers.pop(signature, None)
                layers[signature] = {
                    "prompt": times.prompt.tolist(),
                    "decode": times.decode.tolist(),
                }
        newest = list(layers.items())[-_MOST_CLASSES:]
        self._write({"profile": data.get("profile"), "layers": dict(newest)})

    def _read(self) -> dict[str, Any]:
        """All of it; empty where there is nothing sound."""
        try:
            with open(self._path, "rb") as file:
                data = json.loads(file.read(_MOST_BYTES))
        except (OSError, ValueError, RecursionError):
            return {}
        if not isinstance(data, dict) or data.get("device") != self._identity:
            return {}
        return data

    def _write(self, data: dict[str, Any]) -> None:
        text = json.dumps({"device": self._identity, **data}, indent=1)
        # a full disk or a foreign directory: it is measured again next time
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            handle, part = tempfile.mkstemp(dir=self._path.parent, suffix=".part")
            try:
                with os.fdopen(handle, "w", encoding="utf-8") as file:
                    file.write(text)
                os.replace(part, self._path)
            except BaseException:
                os.unlink(part)
                raise


def _number(value: Any) -> float | None:
    """A time or a speed that can be."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    # what is beyond leads to numbers that are none
    return float(value) if 0 <= value <= _MOST else None


def _array(value: Any, shape: tuple[int, ...]) -> F64 | None:
    try:
        found = np.array(value, np.float64)
    except (ValueError, TypeError, OverflowError):
        return None
    sound = found.shape == shape and bool(((found >= 0) & (found <= _MOST)).all())
    return found if sound else None
