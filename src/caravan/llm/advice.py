"""`plan`: a split for a model, or DoesNotFit with what would fit instead.

Every suggestion was planned like the model itself, so it is known to fit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from caravan import interrupt
from caravan.engine.layouts import TYPE_BLOCK, TYPE_BYTES, TYPE_NUMBERS
from caravan.errors import DoesNotFit
from caravan.llm.arrangement import Arrangement, between, layer_counts
from caravan.llm.devices import EngineDevice
from caravan.llm.needs import DeviceNeeds, Needs, size
from caravan.llm.params import ContextParams, ModelParams
from caravan.llm.planning import Planner, first_split
from caravan.llm.splitter import Splitter

_CELLS = 256  # the engine rounds contexts up to this
_TRIES = 4
_UBATCHES = (256, 128, 64, 32)
_WHOLE_LAYERS = ("layer", "none")


@dataclass(frozen=True, slots=True)
class Suggestion:
    """Something that would fit.

    Attributes:
        text: for people, with the option's name.
        params, context: what to load the model with, and to make the context with.
    """

    text: str
    params: ModelParams
    context: ContextParams


def plan(
    path: Path,
    params: ModelParams,
    devices: tuple[EngineDevice, ...],
    context: ContextParams | None,
    splitter: Splitter | None = None,
    *,
    fit: bool = True,
) -> tuple[list[float], Needs | None]:
    """The devices' shares of the layers, and what they need with such a context.

    Without a context it is a usual one, and only weights that do not fit are refused. The shares
    are the splitter's where none are given, and it has some that fit. Without `fit`, nothing is
    refused, or told of what is needed.

    Raises DoesNotFit, and what the splitter raises. The needs are None where the engine does not
    tell them.
    """
    if params.split_mode not in _WHOLE_LAYERS or not (fit or splitter):
        return first_split(path, devices, params), None
    with Planner(path, devices) as planner:
        if not fit:
            advised = splitter and planner.advised(params, context, splitter)
            return advised or first_split(path, devices, params), None
        found = planner.arrange(params, context, splitter)
        if found is None:
            return first_split(path, devices, params), None
        too_much = not found.needs.fits
        if context is None:
            too_much = any(d.total and d.weights > d.free for d in found.needs.devices)
        if not too_much:
            return found.split, found.needs
        advice = [*_Advice(planner, params, found)]
        raise DoesNotFit(f"{path.name} {told(found.needs, advice)}", found.needs, advice)


def told(needs: Needs, advice: list[Suggestion]) -> str:
    """The error in one line, without what does not fit."""
    lacking = "; ".join(_lack(device) for device in needs.devices if device.lacks)
    fitting = ", or ".join(suggestion.text for suggestion in advice)
    return f"does not fit: {lacking}{f'. It would fit with {fitting}' if fitting else ''}"


def _lack(device: DeviceNeeds) -> str:
    return f"{device.where} lacks {size(device.lacks)} of {size(device.need)} ({device.parts()})"


class _Advice:
    """What would fit instead, one by one."""

    def __init__(self, planner: Planner, params: ModelParams, found: Arrangement) -> None:
        self._planner = planner
        self._params = params
        self._context = found.needs.context
        self._found = found

    def __iter__(self) -> Iterator[Suggestion]:
        makers: tuple[Callable[[], Suggestion | None], ...] = (
            self._split,
            self._shorter,
            self._smaller_cache,
            self._smaller_batch,
            self._fewer_layers,
        )
        alone = False
        for make in makers:
            suggestion = None if interrupt.pending() else make()
            if suggestion is not None:
                alone = True
                yield suggestion
        together = None if alone else self._together()
        if together is not None:
            yield together

    def _fits(self, params: ModelParams, context: ContextParams) -> Arrangement | None:
        found = self._planner.arrange(params, context)
        return found if found is not None and found.needs.fits else None

    def _split(self) -> Suggestion | None:
        """Another split, where one was given."""
        if not any(self._params.tensor_split):
            return None
        free = replace(self._params, tensor_split=())
        found = self._fits(free, self._context)
        if found is None or not found.layers:
            return None
        # what the default goes by may be bytes, which nobody wants to type
        counts = layer_counts(found)
        shares = "/".join(f"{count:.0f}" for count in counts)
        params = replace(self._params, tensor_split=tuple(counts))
        return Suggestion(f"the split {shares} (-ts)", params, self._context)

    def _shorter(self) -> Suggestion | None:
        """The longest context that fits."""
        for cells in self._lengths():
            context = replace(self._context, n_ctx=cells * _CELLS)
            if self._fits(self._params, context) is not None:
                text = f"a context of {context.n_ctx} tokens (-c)"
                return Suggestion(text, self._params, context)
        return None

    def _lengths(self) -> list[int]:
        """Lengths that should fit, in units of _CELLS, the best first; empty if none should."""
        most, long = self._context.n_ctx, self._found
        # below one batch, other things get smaller too
        least = -(-min(self._context.n_ubatch, most) // _CELLS) * _CELLS
        shortest = replace(self._context, n_ctx=least)
        short = self._planner.measure(self._params, long.split, shortest)
        if short is None or most <= least:
            return []
        low, high = least // _CELLS - 1, (most - 1) // _CELLS
        while low < high:
            middle = (low + high + 1) // 2
            part = (middle * _CELLS - least) / (most - least)
            if self._planner.can_hold(between(short, long, part), self._params):
                low = middle
            else:
                high = middle - 1
        if low * _CELLS < least:
            return []
        return list(dict.fromkeys(max(1, low * part // 32) for part in (32, 31, 30, 28)))

    def _smaller_cache(self) -> Suggestion | None:
        """The KV cache in numbers of about one byte."""
        wide = ("f32", "f16", "bf16")
        context = self._context
        if context.flash_attn == "off" or not {context.type_k, context.type_v} & set(wide):
            return None
        types = ["q8_0" if kind in wide else kind for kind in (context.type_k, context.type_v)]
        smaller = replace(context, type_k=types[0], type_v=types[1])
        if self._fits(self._params, smaller) is None:
            return None
        return Suggestion("a KV cache of q8_0 (-ctk q8_0 -ctv q8_0)", self._params, smaller)

    def _smaller_batch(self) -> Suggestion | None:
        """Fewer tokens at once, which takes less for computing."""
        for n_ubatch in _UBATCHES:
            context = replace(self._context, n_ubatch=n_ubatch)
            if n_ubatch < self._context.n_ubatch and self._fits(self._params, context) is not None:
                return Suggestion(f"{n_ubatch} tokens at a time (-ub)", self._params, context)
        return None

    def _together(self) -> Suggestion | None:
        """Fewer tokens at once and a shorter context, where neither is enough alone."""
        for n_ubatch in _UBATCHES:
            if n_ubatch >= self._context.n_ubatch or interrupt.pending():
                continue
            context = replace(self._context, n_ubatch=n_ubatch)
            found = self._planner.arrange(self._params, context)
            shorter = found and _Advice(self._planner, self._params, found)._shorter()
            if shorter:
                text = f"{n_ubatch} tokens at a time (-ub) and {shorter.text}"
                return replace(shorter, text=text)
        return None

    def _fewer_layers(self) -> Suggestion | None:
        """As many layers on the devices as fit, the rest on the CPU."""
        count = len(self._found.layers) - 1
        if self._planner.simulated or self._params.split_mode != "layer" or count < 1:
            return None
        # without a pipeline, computing takes less: what the others need is known only from there
        found = self._planner.arrange(replace(self._params, n_gpu_layers=count), self._context)
        if found is None:
            return None
        room = sum(max(0, space) for space in self._planner.room(found))
        while not found.needs.fits and count and sum(found.layers[-count:]) > room:
            count -= 1
        for _ in range(_TRIES):
            if count <= 0:
                return None
            params = replace(self._params, n_gpu_layers=count)
            if self._fits(params, self._context) is not None:
                return Suggestion(f"{count} layers on the devices (-ngl)", params, self._context)
            count -= max(1, count // 16)
        return None


def require_room(needs: Needs, devices: Sequence[EngineDevice], params: ContextParams) -> None:
    """Raises DoesNotFit if the KV cache of another context than the planned one is certain not to.

    Args:
        needs: of the planned one.
        devices: the model's.
        params: of the other one, with a number of tokens.
    """
    share = _share(needs.context, params)
    now = []
    for device, need in zip(devices, needs.devices, strict=True):
        free, total = device.memory()
        now.append(replace(need, weights=0, kv=int(need.kv * share), free=free, total=total))
    # how much computing takes is left to the engine, which may do with less
    caches = replace(needs, devices=tuple(replace(need, compute=0) for need in now))
    if not caches.fits:
        raise DoesNotFit(f"no context of {params.n_ctx} tokens: it {told(caches, [])}", caches)


def _share(planned: ContextParams, params: ContextParams) -> float:
    """How large the KV cache of `params` is at least, as a share of the planned one."""
    same = ("n_seq_max", "swa_full", "kv_unified", "offload_kqv")
    if any(getattr(planned, name) != getattr(params, name) for name in same):
        return 0.0
    if not params.swa_full and params.n_ctx != planned.n_ctx:
        return 0.0
    pairs = ((params.type_k, planned.type_k), (params.type_v, planned.type_v))
    types = min(_bytes(new) / _bytes(old) for new, old in pairs)
    return types * params.n_ctx / (-(-planned.n_ctx // _CELLS) * _CELLS)


def _bytes(word: str) -> float:
    """Of a number of this type."""
    number = TYPE_NUMBERS[word]
    return float(TYPE_BYTES[number] / TYPE_BLOCK[number])
