"""What a ClusterView looks at, played: devices whose worker's end the test has, a model, totals."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from caravan.batching import BatcherState, SlotState
from caravan.errors import WorkerLost
from caravan.llm.resume import Resumed
from caravan.stream.telemetry import DeviceStats
from stream.scripted import Request, Rig, make_rig
from wired import wait_until

SECOND = 1_000_000_000


def link(rig: Rig, extension: bool = True) -> SimpleNamespace:
    info = SimpleNamespace(memory_free=800, memory_total=1000)
    return SimpleNamespace(stream=rig.stream, extension=extension, info=info)


class Worker:
    """A device, and the worker's end of its connection, which answers when it is told to."""

    def __init__(self, name: str = "RPC0", extension: bool = True) -> None:
        self.rigs = [make_rig(device=name)]
        self.device: Any = SimpleNamespace(
            name=name,
            endpoint="host:50052",
            description="a CPU",
            engine="0.26.0",
            link=link(self.rigs[0], extension),
            allocated=lambda: dict(self.used),
        )
        self.used = {"weights": 100, "kv": 50, "compute": 0}
        self.totals = dict.fromkeys(DeviceStats.__slots__, 0)

    @property
    def rig(self) -> Rig:
        return self.rigs[-1]

    def come_back(self) -> None:
        self.rigs.append(make_rig(device=self.device.name))
        self.device.link = link(self.rig)
        self.totals = dict.fromkeys(DeviceStats.__slots__, 0)

    def work(self, **more: int) -> None:
        """So much is done, within a second of its own."""
        for name, value in {"now": SECOND, **more}.items():
            self.totals[name] += value

    def answer(self) -> list[str]:
        """All that has been asked; which questions those were."""
        told = []
        while len(self.rig.stream._due):
            request = self.rig.peer.request()
            left = len(self.rig.stream._due)
            self.rig.peer.reply(request, self._reply(request))
            wait_until(lambda left=left: len(self.rig.stream._due) < left)
            told.append(request.name)
        return told

    def _reply(self, request: Request) -> bytes:
        values = {"MEMORY": (600, 1000), "STATS": tuple(self.totals.values())}[request.name]
        return b"".join(value.to_bytes(8, "little") for value in values)

    def close(self) -> None:
        for rig in self.rigs:
            rig.take_leave()


class PlayedModel:
    """30 layers on its devices, as equally as they go."""

    def __init__(self, *devices: Any) -> None:
        self.devices = devices
        self.path = Path("some.gguf")
        self.changing = threading.RLock()
        self.needs = None
        self.description, self.size, self.n_params = "llama 1B", 4000, 2000
        self.n_layer, self.n_ctx_train = 30, 4096

    def layer_devices(self) -> list[str]:
        names = [device.name for device in self.devices] or ["CPU"]
        return [names[n * len(names) // 31] for n in range(31)]


class PlayedBatcher:
    """Has the totals that the test gives it."""

    def __init__(self) -> None:
        self.totals = {"n_prompt": 0, "n_cached": 0, "n_gen": 0, "busy_seconds": 0.0}

    def state(self) -> BatcherState:
        slots = (SlotState(0, True, 12, 3, False),)
        return BatcherState(4096, slots, 2, {"stop": 1}, 0, n_steps=9, error=None, **self.totals)


def loss(name: str = "RPC1") -> WorkerLost:
    return WorkerLost("host:50052", name, "GRAPH_COMPUTE", OSError("gone"))


def resumed(lost: WorkerLost, seconds: float = 0.5, n_tokens: int = 10) -> Resumed:
    return Resumed(lost, (), {}, ("RPC0", "RPC1"), seconds, n_tokens)
