"""`ModelWork`: what one model takes of devices, links and the head, out of its own graphs.

A rehearsal gives the graphs of micro-batches of several sizes; here they are cut into layers and
summed up: operations, bytes of weights, bytes moved. From a device's speeds alone follow its times
for each layer; `probe` runs the same graphs to measure them. Knows no split.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from caravan.backend.recording import RecordedGraph
from caravan.llm.params import KV_BLOCK, ContextParams, ModelParams, whole_blocks
from caravan.llm.rehearsal import Rehearsal, Rehearsed, Step
from caravan.plan.head import head_times, timing, traffic_of
from caravan.plan.nodes import features, layers_of, weights_of
from caravan.plan.pipeline import HeadTimes, Traffic
from caravan.plan.profile import DeviceProfile
from caravan.plan.times import F64, DeviceTimes, Grid
from caravan.worker import cost
from caravan.worker.table import Table

# Attention is as good as linear in the length of the KV cache: beyond that, lines go on.
_MOST_KV = 4096
_PARTS = (1, 4, 16)  # of a full micro-batch: sizes that there are in any case
# What each stage costs the head more is little: several make it stand out.
_STAGES = 4


@dataclass(frozen=True, slots=True)
class LayerWork:
    """What one layer takes for one micro-batch.

    Attributes:
        multiply_adds: two operations of arithmetic each.
        weights: bytes of its weights.
        moved: bytes of memory read and written, weights included.
    """

    multiply_adds: float
    weights: int
    moved: float


@dataclass(frozen=True)
class Point:
    """One micro-batch, as a single device would compute it.

    Attributes:
        n_tokens: of all sequences together.
        n_kv: entries of the KV cache that attention looks at, of each sequence.
        layers: (n_nodes,) the layer of every node, ascending; n_layer is the output layer.
    """

    n_tokens: int
    n_kv: int
    graph: RecordedGraph
    layers: NDArray[np.int32]

    @cached_property
    def costs(self) -> tuple[F64, F64]:
        """(n_nodes,) operations, and bytes read and written."""
        return cost.work(Table(self.graph.rows, self.graph.n_nodes))


@dataclass(frozen=True, slots=True)
class ModelWork:
    """See the module.

    Attributes:
        n_layer: without the output layer.
        classes: (n_layer + 1,) layers with equal graphs have equal numbers.
        signatures: of each class, a digest of the ops, types and shapes at all points.
        prompt: micro-batches of a prompt none of whose tokens has an output: each size with each
            n_kv, ascending.
        decode: steps of several sequences, each of whose tokens has an output; likewise.
        weights: (n_layer + 1,) bytes of each layer's weights, the output layer last.
        description: such as `llama 135M Q4_1`.
        n_positions: tokens that a request can have at most; 0: any number.
    """

    n_layer: int
    traffic: Traffic
    head: HeadTimes
    classes: tuple[int, ...]
    signatures: tuple[str, ...]
    prompt: tuple[Point, ...]
    decode: tuple[Point, ...]
    weights: tuple[int, ...] = ()
    description: str = ""
    n_positions: int = 0

    @classmethod
    def of(
        cls,
        path: Path,
        params: ModelParams,
        context: ContextParams,
        *,
        sizes: Sequence[int] = (),
        sequences: Sequence[int] = (1,),
    ) -> ModelWork:
        """Rehearse a model with one device and with several.

        Args:
            params: all layers are taken to be on devices, whatever it says of that.
            context: what it is planned for.
            sizes: micro-batches that are wanted exactly, beside a few others; those that are no
                micro-batches of this context are left out.
            sequences: how many decode together; 1 in any case.

        Raises ModelError, ContextError, DecodeError and, after Ctrl-C, KeyboardInterrupt.
        """
        params = replace(params, n_gpu_layers=-1, split_mode="layer", overrides=())
        with Rehearsal(path, params) as rehearsal:
            frame = _Frame.of(rehearsal, context, sizes)
            script = _Script(rehearsal, frame, sequences)
            prompt, decode, single = script.prompt, script.decode, script.timed
            n_layer, n_vocab = rehearsal.n_layer, rehearsal.n_vocab
            description, n_positions = rehearsal.description, rehearsal.n_positions
        stages = min(_STAGES, n_layer + 1)
        with Rehearsal(path, params, stages) as rehearsal:
            several = rehearsal.run(
                frame.context, timing(frame.tokens[0], frame.tokens[-1], frame.room)
            )
        classes, signatures = _classes([*prompt, *decode], n_layer)
        return cls(
            n_layer=n_layer,
            traffic=traffic_of(several, n_layer, n_vocab),
            head=head_times(single, several, n_vocab),
            classes=classes,
            signatures=signatures,
            prompt=tuple(prompt),
            decode=tuple(decode),
            weights=weights_of(path, decode[0].graph, decode[0].layers, n_layer),
            description=description,
            n_positions=n_positions,
        )

    def __repr__(self) -> str:
        points = len(self.prompt) + len(self.decode)
        return f"<ModelWork of {self.description}: {self.n_layer} layers at {points} points>"

    def layer_work(self, n_tokens: int, n_kv: int, kind: str = "prompt") -> list[LayerWork]:
        """Of every layer, the output layer last, at the nearest point of `prompt` or `decode`."""
        points = self.prompt if kind == "prompt" else self.decode

        def distance(point: Point) -> tuple[float, int]:
            return abs(np.log(point.n_tokens / n_tokens)), abs(point.n_kv - n_kv)

        point = min(points, key=distance)
        flops, moved = (self._by_layer(point, what) for what in point.costs)
        weights = self.weights or (0,) * (self.n_layer + 1)
        return [
            LayerWork(float(f) / 2, w, float(m))
            for f, w, m in zip(flops, weights, moved, strict=True)
        ]

    def times(self, device: DeviceProfile) -> DeviceTimes:
        """By GFLOPS and GB/s alone, node after node, whichever takes longer; what a graph takes on
        top is not in it."""
        return DeviceTimes(self._grid(self.prompt, device), self._grid(self.decode, device))

    def _grid(self, points: Sequence[Point], device: DeviceProfile) -> Grid:
        """Also between the points, where a node turns from waiting for memory to computing."""
        known = sorted({point.n_tokens for point in points})
        kv = sorted({point.n_kv for point in points})
        table = {(point.n_tokens, point.n_kv): point for point in points}
        tokens = sorted({*known, *_powers(known[0], known[-1])})
        seconds = np.zeros((len(tokens), len(kv), self.n_layer + 1))
        for i, n_tokens in enumerate(tokens):
            for j, n_kv in enumerate(kv):
                low = table[max(n for n in known if n <= n_tokens), n_kv]
                high = table[min(n for n in known if n >= n_tokens), n_kv]
                seconds[i, j] = self._seconds(low, high, n_tokens, device)
        return Grid(tuple(tokens), tuple(kv), seconds)

    def _seconds(self, low: Point, high: Point, n_tokens: int, device: DeviceProfile) -> F64:
        part = (n_tokens - low.n_tokens) / max(1, high.n_tokens - low.n_tokens)
        if low.graph.n_nodes == high.graph.n_nodes:
            return self._by_layer(low, _node_seconds(_between(low.costs, high.costs, part), device))
        # of several sequences there are other nodes than of one
        one, other = (self._by_layer(p, _node_seconds(p.costs, device)) for p in (low, high))
        return one + (other - one) * part

    def _by_layer(self, point: Point, values: F64) -> F64:
        return np.asarray(np.bincount(point.layers, values, self.n_layer + 1), np.float64)


def _powers(first: int, last: int) -> Iterable[int]:
    number = 1
    while number < last:
        if number > first:
            yield number
        number *= 2


def _between(low: tuple[F64, F64], high: tuple[F64, F64], part: float) -> tuple[F64, F64]:
    """Operations and bytes of each node for another number of tokens: straight lines, as nearly all
    ops go by the tokens."""
    flops, moved = low
    more_flops, more_moved = high
    return flops + (more_flops - flops) * part, moved + (more_moved - moved) * part


def _node_seconds(costs: tuple[F64, F64], device: DeviceProfile) -> F64:
    flops, moved = costs
    return np.asarray(np.maximum(flops / device.gflops, moved / device.gbps) * 1e-9)


@dataclass(frozen=True, slots=True)
class _Frame:
    """Which micro-batches there are.

    Attributes:
        context: one for a single sequence.
        tokens: of micro-batches, ascending; the last is a full one.
        prompt_kv, decode_kv: of the points, ascending.
        room: tokens that the context can hold.
    """

    context: ContextParams
    tokens: tuple[int, ...]
    prompt_kv: tuple[int, ...]
    decode_kv: tuple[int, ...]
    room: int

    @classmethod
    def of(cls, rehearsal: Rehearsal, context: ContextParams, sizes: Sequence[int]) -> _Frame:
        room = whole_blocks(context.n_ctx or rehearsal.n_ctx_train)
        if rehearsal.n_positions:
            # those that are more are on the lines through these
            room = min(room, max(KV_BLOCK, rehearsal.n_positions // KV_BLOCK * KV_BLOCK))
        full = min(context.n_ubatch, context.n_batch, room)
        tokens = {max(1, full // part) for part in _PARTS}
        tokens |= {size for size in sizes if 0 < size <= full}
        low, high = whole_blocks(full), min(room, _MOST_KV)
        several = high > low and not rehearsal.recurrent
        prompt_kv = (low, high) if several else (low,)
        decode_kv = (KV_BLOCK, prompt_kv[-1]) if several and high > KV_BLOCK else (prompt_kv[-1],)
        wanted = replace(context, n_ctx=room, n_seq_max=1)
        return cls(wanted, tuple(sorted(tokens)), prompt_kv, decode_kv, room)

    def points(self) -> list[tuple[str, int, int]]:
        """(prompt or decode, tokens, entries) of each point, so that little has to be read for
        them: what is held shrinks by a few tokens, or grows."""
        low, high = self.prompt_kv[0], self.prompt_kv[-1]
        found = [("decode", 1, self.decode_kv[0])]
        for kv in sorted({low, high}):
            found += [("prompt", tokens, kv) for tokens in reversed(self.tokens)]
        if self.decode_kv[-1] != self.decode_kv[0]:
            found.append(("decode", 1, self.decode_kv[-1]))
        return found


class _Script:
    """The rehearsal with one device.

    Attributes:
        prompt, decode: see ModelWork.
        timed: micro-batches of one sequence; the first one does not count.
    """

    def __init__(self, rehearsal: Rehearsal, frame: _Frame, sequences: Sequence[int]) -> None:
        n_layer, points = rehearsal.n_layer, frame.points()
        timed = timing(frame.tokens[0], frame.tokens[-1], frame.room)
        steps = [_step(kind, tokens, kv) for kind, tokens, kv in points]
        found = rehearsal.run(frame.context, [*timed, *steps])
        self.timed = found[: len(timed)]
        made: dict[str, dict[tuple[int, int], Point]] = {"prompt": {}, "decode": {}}
        for (kind, tokens, kv), step in zip(points, found[len(timed) :], strict=True):
            made[kind][tokens, kv] = _point(tokens, kv, step, n_layer)
        for n_seqs in sorted({*sequences} - {1}):
            batch = max(frame.context.n_batch, n_seqs)
            room = n_seqs * frame.decode_kv[-1]
            context = replace(frame.context, n_ctx=room, n_batch=batch)
            context = replace(context, n_ubatch=max(context.n_ubatch, n_seqs))
            steps = [_step("decode", 1, kv) for kv in frame.decode_kv]
            for kv, step in zip(
                frame.decode_kv, rehearsal.run(context, steps, n_seqs), strict=True
            ):
                made["decode"][n_seqs, kv] = _point(n_seqs, kv, step, n_layer)
        self.prompt, self.decode = (
            [made[kind][key] for key in sorted(made[kind])] for kind in ("prompt", "decode")
        )


def _point(n_tokens: int, n_kv: int, step: Rehearsed, n_layer: int) -> Point:
    (graph,) = step.graphs
    return Point(n_tokens, n_kv, graph, layers_of(graph, n_layer))


def _step(kind: str, tokens: int, kv: int) -> Step:
    return Step(tokens, "all" if kind == "decode" else "none", at=kv - tokens)


def _classes(points: Sequence[Point], n_layer: int) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Number of the class of each layer, and a digest of each class."""
    digests = [hashlib.blake2b(digest_size=8) for _ in range(n_layer + 1)]
    for point in points:
        lines = features(point.graph)
        ends = np.searchsorted(point.layers, np.arange(n_layer + 1), side="right")
        start = 0
        for digest, end in zip(digests, ends.tolist(), strict=True):
            digest.update(b"%d,%d:" % (point.n_tokens, point.n_kv) + lines[start:end].tobytes())
            start = end
    # it stands alone, and is computed at other times
    digests[-1].update(b"output")
    texts = [digest.hexdigest() for digest in digests]
    known = {text: number for number, text in enumerate(dict.fromkeys(texts))}
    return tuple(known[text] for text in texts), tuple(known)
