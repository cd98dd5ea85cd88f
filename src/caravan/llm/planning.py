"""Where the layers of a model go, and whether they fit, before anything of it is sent.

The default split goes by free memory, or is a splitter's. Where that does not leave room for KV
cache and compute buffers, another one that does is looked for. Called by `model`; what would fit
instead is `advice`.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from caravan import engine, interrupt
from caravan.llm.arrangement import MARGIN, Arrangement, holds, layer_counts, layer_sizes
from caravan.llm.devices import EngineDevice, check_all
from caravan.llm.dryrun import DryRun, Part
from caravan.llm.needs import DeviceNeeds, Needs
from caravan.llm.params import ContextParams, ModelParams, usual_n_ctx
from caravan.llm.placement import CPU, filled_layers, whole_layers
from caravan.llm.splitter import SplitRequest, Splitter
from caravan.models.ledger import known_header

# of a context that nobody has asked for
_ROUNDS = 3
# the engine makes no pipeline of a model some of whose tensors are elsewhere; these are none
_NO_PIPELINE = (("^$", CPU),)


class Planner:
    """Plans for one file and some devices. Use it as a context manager.

    Args:
        path: the model's file.
        devices: those that it shall use, in order.

    Attributes:
        simulated: whether one of them is.
    """

    def __init__(self, path: Path, devices: tuple[EngineDevice, ...]) -> None:
        self._path = path
        self._devices = devices
        self._memory = [device.memory() for device in devices]
        self._key: tuple[object, ...] = ()
        self._run: DryRun | None = None
        self.simulated = any(device.simulated for device in devices)

    def __enter__(self) -> Planner:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._run is not None:
            self._run.close()

    def arrange(
        self,
        params: ModelParams,
        context: ContextParams | None,
        splitter: Splitter | None = None,
    ) -> Arrangement | None:
        """The split as given, or the splitter's, or by memory: one that fits, if there is any.

        None where the engine refuses the model or the context, or gives no numbers. Raises what the
        splitter raises.
        """
        best = self._in_pipeline(params, context, splitter)
        if best is None or best.needs.fits or len(self._devices) < 2 or params.overrides:
            return best
        # where its buffers do not fit, the engine tries again without the pipeline
        alone = replace(params, overrides=_NO_PIPELINE)
        found = self.measure(alone, best.split, context)
        if found is None or not found.needs.fits:
            return best
        return replace(found, needs=replace(found.needs, pipeline=False))

    def advised(
        self, params: ModelParams, context: ContextParams | None, splitter: Splitter
    ) -> list[float] | None:
        """The splitter's split alone; None where it has none, or none that fits."""
        found = self._first(params, context)
        if found is None or not self._open(params):
            return None
        advised = self._advised(splitter, params, context, found)
        return None if advised is None else advised.split

    def _first(self, params: ModelParams, context: ContextParams | None) -> Arrangement | None:
        return self.measure(params, first_split(self._path, self._devices, params), context)

    def _open(self, params: ModelParams) -> bool:
        """Whether there is another split to be looked for."""
        known = all(total for _, total in self._memory)
        return known and len(self._devices) > 1 and not any(params.tensor_split)

    def _in_pipeline(
        self, params: ModelParams, context: ContextParams | None, splitter: Splitter | None
    ) -> Arrangement | None:
        best = found = self._first(params, context)
        if not self._open(params):
            return best
        advised = found and splitter and self._advised(splitter, params, context, found)
        if advised:
            return advised
        tried = []
        for _ in range(_ROUNDS):
            if found is None or best is None or best.roomy or interrupt.pending():
                break
            tried.append(found.split)
            split = self._better(found, params)
            if split is None or split in tried:
                break
            found = self.measure(params, split, context)
            if found is not None and (found.roomy or found.needs.lacks < best.needs.lacks):
                best = found
        return best

    def _advised(
        self,
        splitter: Splitter,
        params: ModelParams,
        context: ContextParams | None,
        found: Arrangement,
    ) -> Arrangement | None:
        """The splitter's split, with room to spare; None where it has none, or none can fit."""
        if not found.layers or not self.can_hold(found, params):
            return None
        request = SplitRequest(
            self._path,
            params,
            self._devices,
            found.needs.context,
            found.layers,
            self.room(found),
            layer_counts(found),
        )
        tried: list[list[float]] = []
        while len(tried) < _ROUNDS:
            split = None if interrupt.pending() else splitter.split(request)
            if split is None:
                return None
            if split in tried:
                break
            tried.append(split)
            advised = self.measure(params, split, context)
            if advised is None:
                break
            if advised.roomy:
                splitter.settled(True)
                return advised
            # what a device takes for computing depends on what it computes
            request = replace(request, room=self.room(advised))
        splitter.settled(False)
        return None

    def measure(
        self, params: ModelParams, split: list[float], context: ContextParams | None
    ) -> Arrangement | None:
        """What a split takes; None as for `arrange`."""
        run = self._dry_run(params, split)
        if not run.handle:
            return None
        wanted = context or ContextParams(n_ctx=usual_n_ctx(run.n_ctx_train))
        parts = run.measure(wanted)
        check_all(self._devices)
        if parts is None:
            return None
        needs = self._needs(parts, replace(wanted, n_ctx=wanted.n_ctx or run.n_ctx_train))
        layers = layer_sizes(parts, split, params.n_gpu_layers, run.n_layer)
        return Arrangement(split, needs, layers, parts)

    def _dry_run(self, params: ModelParams, split: list[float]) -> DryRun:
        """The one before, if that is it."""
        key = (params, tuple(split))
        if self._run is None or key != self._key:
            if self._run is not None:
                self._run.close()
            self._run = DryRun(self._path, params, self._devices, split)
            self._key = key
        return self._run

    def _needs(self, parts: list[Part], context: ContextParams) -> Needs:
        devices = [
            DeviceNeeds(
                device.name,
                getattr(device, "endpoint", ""),
                part.weights,
                part.kv,
                part.compute,
                free,
                total,
            )
            for device, part, (free, total) in zip(
                self._devices, parts[:-1], self._memory, strict=True
            )
        ]
        host = parts[-1]
        own = DeviceNeeds(CPU, "", host.weights, host.kv, host.compute, 0, 0)
        return Needs(tuple(devices), own, context)

    def _better(self, found: Arrangement, params: ModelParams) -> list[float] | None:
        """A split that should fit better than one that was measured."""
        if not found.layers:
            return None
        room = self.room(found)
        placed = len(found.layers)
        counts: list[float] | None = whole_layers(placed - 1, placed, [max(0, r) for r in room])
        if counts is None or sum(counts) != placed or not holds(counts, found.layers, room):
            counts = filled_layers(found.layers, room)
        return counts

    def can_hold(self, found: Arrangement, params: ModelParams) -> bool:
        """Whether the devices have room for the layers: as they are split, or else somehow."""
        room = self.room(found)
        if any(params.tensor_split) or len(room) < 2:
            counts: list[float] | None = layer_counts(found)
        else:
            counts = filled_layers(found.layers, room)
        return counts is not None and holds(counts, found.layers, room)

    def room(self, found: Arrangement) -> list[int]:
        """Bytes that each device would have for layers, were its part in computing the same."""
        most = max(part.compute for part in found.parts[:-1])
        return [
            # nobody knows what one takes that has computed nothing yet
            int(free * (1 - MARGIN)) - (part.compute if part.weights else most)
            for part, (free, _) in zip(found.parts[:-1], self._memory, strict=True)
        ]


def first_split(path: Path, devices: tuple[EngineDevice, ...], params: ModelParams) -> list[float]:
    """The devices' shares of the layers: as given, else by free memory in whole layers."""
    shares = _shares(devices, params)
    if any(params.tensor_split) or params.split_mode != "layer":
        return shares
    n_layer = known_header(path).layers if len(shares) > 1 else None
    if n_layer is None:
        return shares
    return whole_layers(n_layer, params.n_gpu_layers, shares)


def _shares(devices: tuple[EngineDevice, ...], params: ModelParams) -> list[float]:
    """The devices' shares of the layers, as the engine sees them at the start of the load."""
    given = [*params.tensor_split, *[0.0] * len(devices)][: len(devices)]
    if any(given):
        return given
    sizes = [device.memory() for device in devices]
    if not all(total for _, total in sizes):
        ggml = engine.load().ggml
        cpu = ggml.dev_memory(ggml.dev_by_name(b"CPU"))
        sizes = [size if any(size) else cpu for size in sizes]
    return [float(free) for free, _ in sizes]
