"""`MemoryModel`: what any split of a model takes of its devices, from a few dry runs.

Weights and KV cache belong to layers and add up. What is computed with is the same for all devices
with the same part in the pipeline: the only one, the first, one in the middle, the last; whether
they have one layer, two or many. One dry run measures several of these. Where the engine's
allocator finds its gaps is a matter of luck: for some splits it takes a fifth more. Nothing is
asked of any device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from caravan.backend.recording import recording_devices
from caravan.errors import ContextError
from caravan.llm.arrangement import MARGIN, Arrangement
from caravan.llm.needs import DeviceNeeds
from caravan.llm.params import ContextParams, ModelParams
from caravan.llm.planning import Planner
from caravan.models.splits import read_parts

_MEMORY = (1 << 46, 1 << 46)
_ALIGNMENT = 32
# more blocks than this need no more to compute with
_MANY = 3
_UNKNOWN = 1 << 62

# (role, blocks up to _MANY)
_Part = tuple[str, int]


@dataclass(frozen=True, slots=True)
class MemoryModel:
    """See the module. All layers are taken to be on devices.

    Attributes:
        weights, kv: bytes of each layer, the output layer last.
        compute: bytes that a device computes with, by its role (`only`, `first`, `middle`, `last`)
            and the number of its blocks: 0 for the output layer alone, at most 3.
    """

    weights: tuple[int, ...]
    kv: tuple[int, ...]
    compute: dict[_Part, int]

    @classmethod
    def of(cls, path: Path, params: ModelParams, context: ContextParams) -> MemoryModel:
        """Some dry runs: four, more of a model of less than nine layers.

        Raises ModelError for a file that is none, DoesNotFit for a context that would end this
        process, and ContextError where the engine refuses it, or gives no account of its memory.
        """
        params = replace(params, n_gpu_layers=-1, split_mode="layer", overrides=(), tensor_split=())
        sizes = {
            name: -(-span.size // _ALIGNMENT) * _ALIGNMENT
            for file in read_parts(path)
            for name, span in file.header.tensors.items()
        }
        whole = _measure(path, params, context, [1])
        weights, kv = _by_layer(sizes, whole)
        compute: dict[_Part, int] = {("only", _MANY): whole.parts[0].compute}
        for counts in _splits(len(weights)):
            found = _measure(path, params, context, counts)
            for number, (part, key) in enumerate(zip(found.parts, _parts(counts), strict=False)):
                # those in the middle with the same number may differ by a few bytes
                if counts[number]:
                    compute[key] = max(part.compute, compute.get(key, 0))
        return cls(weights, kv, compute)

    @property
    def layers(self) -> tuple[int, ...]:
        """Bytes of weights and KV cache of each layer, the output layer last."""
        return tuple(w + k for w, k in zip(self.weights, self.kv, strict=True))

    def needs(self, counts: Sequence[int], memory: Sequence[tuple[int, int]]) -> list[DeviceNeeds]:
        """Of each device in order, named RPC0, RPC1 and so on.

        Args:
            counts: layers of each, the output layer counted with the last that has any.
            memory: free and total bytes of each; 0 and 0 where it is not known.
        """
        needs = []
        at = 0
        parts = _parts(counts)
        for number, (count, (free, total)) in enumerate(zip(counts, memory, strict=True)):
            own = slice(at, at + count)
            at += count
            weights, kv = sum(self.weights[own]), sum(self.kv[own])
            compute = self._compute(parts[number]) if count else 0
            needs.append(DeviceNeeds(f"RPC{number}", "", weights, kv, compute, free, total))
        return needs

    def room(self, memory: Sequence[tuple[int, int]], *, ordered: bool = False) -> list[int]:
        """Bytes that each device has for layers, whatever its part in the pipeline will be.

        Args:
            ordered: the devices are in the order of the layers, and all of them get some.
        """
        last = len(memory) - 1
        rooms = []
        for number, (free, total) in enumerate(memory):
            if last == 0:
                roles = {"only"}
            elif ordered:
                roles = {"first" if number == 0 else "last" if number == last else "middle"}
            else:
                roles = {"first", "middle", "last"}
            most = max(
                (size for (role, _), size in self.compute.items() if role in roles),
                default=max(self.compute.values()),
            )
            rooms.append(int(free * (1 - MARGIN)) - most if total else _UNKNOWN)
        return rooms

    def _compute(self, part: _Part) -> int:
        role, blocks = part
        if role == "all":
            # with others that have nothing: the buffers of a pipeline's both ends
            return max(self._compute(("first", blocks)), self._compute(("last", blocks)))
        known = {count: size for (other, count), size in self.compute.items() if other == role}
        if not known:
            return max(self.compute.values())
        return known[min(known, key=lambda count: (abs(count - blocks), -count))]


def _parts(counts: Sequence[int]) -> list[_Part]:
    """Role of each device and how many blocks it has, which the output layer is none of."""
    used = [number for number, count in enumerate(counts) if count]
    parts = []
    for number, count in enumerate(counts):
        if len(counts) == 1:
            role = "only"
        elif used == [number]:
            role = "all"
        elif used and number == used[-1]:
            role = "last"
        else:
            role = "first" if used and number == used[0] else "middle"
        blocks = count - 1 if role in ("last", "only", "all") else count
        parts.append((role, max(0, min(blocks, _MANY))))
    return parts


def _splits(total: int) -> list[list[int]]:
    """Layers of each device, for dry runs in which all parts in a pipeline occur."""
    wanted = [[1, 1, 1], [2, 2], [total // 3, total // 3, total - total // 3 * 2]]
    if total > 3:
        wanted[0] = [1, 1, total - 3, 1]
    if total > 4:
        wanted[1] = [2, total - 4, 2]
    wanted = [counts for counts in wanted if sum(counts) == total and all(counts)]
    if total < 3 * _MANY:
        wanted += [[count, total - count] for count in range(1, total)]
    return wanted


def _measure(
    path: Path, params: ModelParams, context: ContextParams, counts: Sequence[int]
) -> Arrangement:
    with (
        recording_devices([_MEMORY] * len(counts)) as devices,
        Planner(path, tuple(devices)) as planner,
    ):
        found = planner.measure(params, [float(count) for count in counts], context)
    if found is None or not found.layers:
        raise ContextError(f"{path}: the engine gives no account of the memory that it would take")
    return found


def _by_layer(
    sizes: Mapping[str, int], whole: Arrangement
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Bytes of weights and KV cache of each layer, from those of all tensors, and from all layers
    on one device."""
    part, blocks = whole.parts[0], len(whole.layers) - 1
    weights = [0] * blocks
    for name, size in sizes.items():
        kind, _, behind = name.partition(".")
        number = behind.partition(".")[0]
        if kind == "blk" and number.isdigit() and int(number) < blocks:
            weights[int(number)] += size
    # never more than there is, where the engine leaves some tensors out
    weights = [min(own, both) for own, both in zip(weights, whole.layers, strict=False)]
    kv = [both - own for own, both in zip(weights, whole.layers, strict=False)]
    rest = part.kv - sum(kv)
    without = [layer for layer, size in enumerate(kv) if not size]
    if rest > 0 and without:
        # the state of a recurrent model is not watched, and all its layers are alike
        for layer in without:
            kv[layer] = rest // len(without)
        rest -= rest // len(without) * len(without)
    return (*weights, part.weights - sum(weights)), (*kv, max(0, rest))
