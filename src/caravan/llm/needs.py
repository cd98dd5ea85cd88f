"""`Needs`: what a model and a context take of each device's memory, beside what is free there."""

from __future__ import annotations

from dataclasses import dataclass

from caravan.llm.params import ContextParams

_UNITS = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


@dataclass(frozen=True, slots=True)
class DeviceNeeds:
    """Of one device, in bytes.

    Attributes:
        name: as in `RPC0`.
        endpoint: of its worker; empty for a device of this process's own engine.
        weights: of the model's tensors that lie there.
        kv: of the context's memory: KV cache, or the state of a recurrent model.
        compute: of the buffers for what is computed.
        free, total: as the device says before anything is loaded; 0 and 0 if it does not say.
    """

    name: str
    endpoint: str
    weights: int
    kv: int
    compute: int
    free: int
    total: int

    @property
    def need(self) -> int:
        """All three together."""
        return self.weights + self.kv + self.compute

    @property
    def lacks(self) -> int:
        """Bytes that are missing for that; 0 where it fits, or where the size is not known."""
        return max(0, self.need - self.free) if self.total else 0

    @property
    def where(self) -> str:
        """Name and endpoint."""
        return f"{self.name} at {self.endpoint}" if self.endpoint else self.name

    def parts(self, kv: str = "KV cache") -> str:
        """What it is made of, in the unit of the sum: `weights 31.7, KV cache 2.8, compute 14.0`.

        Args:
            kv: what the context's memory is called.
        """
        named = ((self.weights, "weights"), (self.kv, kv), (self.compute, "compute"))
        unit, _ = _unit(self.need)
        return ", ".join(f"{word} {_number(part / unit)}" for part, word in named if part)

    def __str__(self) -> str:
        """As short as a line of a terminal. It has no endpoint, which may be long."""
        free = size(self.free) if self.total else "unknown"
        if not self.need:
            return f"{self.name} gets no layers; free {free}"
        return f"{self.name} needs {size(self.need)}: {self.parts('KV')}; free {free}"


@dataclass(frozen=True, slots=True)
class Needs:
    """Of all devices.

    Attributes:
        devices: in the order of the model's.
        host: what stays in this process: weights that are on no device (most often mapped from the
            file, which takes no memory that others could not have), and its part in computing.
        context: what this is for; its `n_ctx` is never 0.
        pipeline: False where the buffers for several batches at a time do not fit, so that the
            devices take turns, which makes prompts slow.
    """

    devices: tuple[DeviceNeeds, ...]
    host: DeviceNeeds
    context: ContextParams
    pipeline: bool = True

    @property
    def fits(self) -> bool:
        """Whether no device lacks anything."""
        return not any(device.lacks for device in self.devices)

    @property
    def lacks(self) -> int:
        """Bytes that all devices together lack."""
        return sum(device.lacks for device in self.devices)


def size(number: int) -> str:
    """Bytes for people: `1.5 GiB`."""
    unit, word = _unit(number)
    if unit == 1:
        return f"{number} B" if number else "0"
    return f"{_number(number / unit)} {word}"


def _unit(number: int) -> tuple[int, str]:
    return next(((unit, word) for unit, word in _UNITS if number >= unit), (1, "B"))


def _number(value: float) -> str:
    """In at most four characters."""
    if 0 < value < 0.05:
        return "<0.1"
    return f"{value:.1f}" if value < 99.95 else f"{value:.0f}"
