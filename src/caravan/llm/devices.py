"""Devices that a model can be put on: what the llm floor needs of one, and the engine's own."""

from __future__ import annotations

from typing import Protocol

from caravan import engine
from caravan.engine import layouts


class EngineDevice(Protocol):
    """A device of the loaded engine, local or remote."""

    @property
    def handle(self) -> int:
        """Address of its ggml_backend_device."""

    @property
    def name(self) -> str:
        """Such as `RPC0` or `CUDA0`."""

    @property
    def description(self) -> str:
        """Text for people."""

    def memory(self) -> tuple[int, int]:
        """Free and total bytes."""

    def check(self) -> None:
        """Raises WorkerLost once the device is lost."""


class LocalDevice:
    """A device of this machine."""

    def __init__(self, handle: int) -> None:
        ggml = engine.load().ggml
        self.handle = handle
        self.name: str = ggml.dev_name(handle).decode()
        self.description: str = ggml.dev_description(handle).decode("utf-8", "replace")
        self.type: int = ggml.dev_type(handle)

    def __repr__(self) -> str:
        return f"<LocalDevice {self.name}: {self.description}>"

    def memory(self) -> tuple[int, int]:
        return engine.load().ggml.dev_memory(self.handle)

    def check(self) -> None:
        return


def local_devices() -> list[LocalDevice]:
    """The engine's own GPUs (integrated ones too); the CPU, which always takes part, is not one."""
    ggml = engine.load().ggml
    devices = [LocalDevice(ggml.dev_get(index)) for index in range(ggml.dev_count())]
    gpus = (layouts.DEVICE_TYPE_GPU, layouts.DEVICE_TYPE_IGPU)
    return [device for device in devices if device.type in gpus]
