"""`Rehearsal`: a model loaded without its weights onto devices that record, to see its graphs.

The engine places every tensor, makes contexts and decodes as it would with workers; what would
travel is taken down (`backend.recording`), and nothing is computed but what the head's CPU does:
looking up the tokens' embeddings. Of the files no more than that is read. Called by `plan`.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from caravan import engine, interrupt
from caravan.backend.recording import RecordedGraph, RecordingDevice, recording_devices
from caravan.engine.layouts import OP_NAMES
from caravan.engine.llama import Batch
from caravan.engine.log import muted
from caravan.errors import ContextError, DecodeError, ModelError, UsageError
from caravan.llm import orphans
from caravan.llm.dryrun import no_vocabulary, refuse_endless
from caravan.llm.params import ContextParams, ModelParams, c_context_params, c_model_params
from caravan.llm.placement import whole_layers
from caravan.llm.refusal import reason
from caravan.llm.weightless import load_weightless
from caravan.models.ledger import known_header
from caravan.models.splits import read_parts

# What each device says that it has; nothing is ever taken of it.
_MEMORY = (1 << 46, 1 << 46)
_OUTPUTS = ("none", "last", "all")
_FLASH, _SOFT_MAX = OP_NAMES.index("FLASH_ATTN_EXT"), OP_NAMES.index("SOFT_MAX")
_SEED = 20261130
# a row for each position that the model was made for
_POSITIONS = "position_embd.weight"


@dataclass(frozen=True, slots=True)
class Step:
    """One micro-batch.

    Attributes:
        n_tokens: of each sequence.
        outputs: of which of them logits are computed: `none`, `last` (of each sequence) or `all`.
        at: position of the first; what the sequences hold from there on is forgotten before. None:
            behind those that they hold.
        rest: seconds to wait before it, as a head waits for devices; what comes then takes longer
            than what follows at once.
    """

    n_tokens: int
    outputs: str = "none"
    at: int | None = None
    rest: float = 0.0


@dataclass(frozen=True, slots=True)
class Rehearsed:
    """What a step would have put on the way.

    Attributes:
        graphs: of each device; empty where it has no layers.
        n_tokens: of all sequences together.
        n_kv: entries of the KV cache that attention looks at, the most of all layers; 0: none.
        seconds: that the head's thread took for the engine's call.
        reused: whether the graphs are those of the step before.
        written: bytes that the head writes to each device.
        sent: how many of these travel, as those that change nothing do not.
        crossed: bytes of activations, as f32, that come to each device from another.
    """

    graphs: tuple[RecordedGraph, ...]
    n_tokens: int
    n_kv: int
    seconds: float
    reused: bool
    written: tuple[int, ...]
    sent: tuple[int, ...]
    crossed: tuple[int, ...]


class Rehearsal:
    """See the module. Use it as a context manager, or `close` it; on one thread.

    Args:
        path: the model's file, the first of several, or a description without weights.
        params: its split is not looked at.
        n_devices: how many devices record.
        split: their shares of the layers; None: equal ones.

    Attributes:
        n_layer, n_embd, n_vocab, n_ctx_train: of the model; n_layer is without the output layer.
        description: such as `llama 135M Q4_1`.
        size: bytes of all tensors.
        recurrent: whether it keeps a state of one size instead of a KV cache.
        n_positions: how many it has learned, beyond which the engine ends the process; 0: any
            number will do.

    Raises ModelError: no such file, or the engine refuses it; and, after Ctrl-C, KeyboardInterrupt.
    """

    def __init__(
        self,
        path: Path,
        params: ModelParams,
        n_devices: int = 1,
        split: Sequence[float] | None = None,
    ) -> None:
        self._llama = engine.load().llama
        self._path = path
        self._handle = 0
        self._stack = ExitStack()
        try:
            self._devices = self._stack.enter_context(recording_devices([_MEMORY] * n_devices))
            shares = list(split) if split is not None else _equal(path, params, n_devices)
            self._load(replace(params, tensor_split=tuple(shares)))
            self._read_facts()
        except BaseException:
            self.close()
            raise

    def __repr__(self) -> str:
        state = self.description if self._handle else "closed"
        return f"<Rehearsal of {self._path.name} on {len(self._devices)} devices: {state}>"

    def __enter__(self) -> Rehearsal:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Free it. Does nothing the second time."""
        handle, self._handle = self._handle, 0
        try:
            if handle:
                with interrupt.deferred(), muted():
                    self._llama.model_free(handle)
        finally:
            self._stack.close()

    def _load(self, params: ModelParams) -> None:
        devices = tuple(self._devices)
        c_params, keep = c_model_params(params, devices)
        c_params.check_tensors = False
        no_words = no_vocabulary()
        with interrupt.deferred(), muted():
            orphans.free_all()
            # reading the vocabulary takes longer than all the rest; not all models do without it
            c_params.kv_overrides = ctypes.addressof(no_words)
            self._handle = load_weightless(self._path, devices, c_params)
            if not self._handle and not interrupt.pending():
                c_params.kv_overrides = None
                self._handle = load_weightless(self._path, devices, c_params)
        del keep
        if not self._handle:
            why = reason("no reason given")
            raise ModelError(f"{self._path}: the engine cannot load it: {why}")

    def _read_facts(self) -> None:
        llama, handle = self._llama, self._handle
        text = ctypes.create_string_buffer(256)
        llama.model_desc(handle, text, len(text))
        self.description = text.value.decode("utf-8", "replace")
        self.size: int = llama.model_size(handle)
        self.n_layer: int = llama.model_n_layer(handle)
        self.n_embd: int = llama.model_n_embd(handle)
        self.n_ctx_train: int = llama.model_n_ctx_train(handle)
        self.n_vocab: int = llama.vocab_n_tokens(llama.model_get_vocab(handle))
        self.recurrent: bool = llama.model_is_recurrent(handle)
        learned = any(_POSITIONS in part.header.tensors for part in read_parts(self._path))
        self.n_positions = self.n_ctx_train if learned else 0

    def run(
        self, context: ContextParams, steps: Sequence[Step], n_seqs: int = 1
    ) -> list[Rehearsed]:
        """Decode some micro-batches in one new context, one after the other.

        Args:
            context: its n_ctx is for all sequences together, each of which has an equal part.
            n_seqs: sequences that are decoded together, each with its own tokens.

        Raises UsageError for a step that is more than one micro-batch, or for positions that the
        model does not know, ContextError, DecodeError,
        WorkerLost for an error in a callback and, after Ctrl-C, KeyboardInterrupt.
        """
        wanted = replace(context, n_seq_max=n_seqs, kv_unified=False)
        with _Stage(self, self._devices, wanted, n_seqs) as stage:
            return [stage.play(step) for step in steps]

    def require_open(self) -> int:
        """The llama_model; raises ModelError once it is closed."""
        if not self._handle:
            raise ModelError(f"{self._path}: the rehearsal is over")
        return self._handle


class _Stage:
    """A context of a rehearsal; freed at its end."""

    def __init__(
        self,
        rehearsal: Rehearsal,
        devices: Sequence[RecordingDevice],
        context: ContextParams,
        n_seqs: int,
    ) -> None:
        self._llama = llama = engine.load().llama
        self._devices = devices
        self._n_seqs = n_seqs
        if not rehearsal.recurrent:
            refuse_endless(context.n_ctx)
        model = rehearsal.require_open()
        with interrupt.deferred(), muted():
            self._handle: int = llama.init_from_model(model, c_context_params(context)) or 0
        if not self._handle:
            raise ContextError(
                f"no context of {context.n_ctx} tokens: {reason('the engine refuses it')}"
            )
        self._memory = llama.get_memory(self._handle)
        self._most = min(llama.n_batch(self._handle), llama.n_ubatch(self._handle))
        self._n_positions = rehearsal.n_positions
        self._held = 0
        # equal ones would have equal embeddings, which would not be sent twice
        self._random = np.random.default_rng(_SEED)
        self._n_vocab = max(1, rehearsal.n_vocab)

    def __enter__(self) -> _Stage:
        return self

    def __exit__(self, *exc: object) -> None:
        with interrupt.deferred(), muted():
            self._llama.free(self._handle)

    def play(self, step: Step) -> Rehearsed:
        if step.outputs not in _OUTPUTS:
            raise UsageError(f"outputs {step.outputs!r} is none of {', '.join(_OUTPUTS)}")
        if not 0 < step.n_tokens * self._n_seqs <= self._most:
            raise UsageError(
                f"{step.n_tokens} tokens of {self._n_seqs} sequences are not one micro-batch"
                f" (of 1 to {self._most})"
            )
        if step.at is not None and step.at != self._held:
            self._go_to(step.at)
        for device in self._devices:
            device.take()
        if step.rest:
            time.sleep(step.rest)
        seconds = self._decode(step.n_tokens, step.outputs, self._n_seqs)
        found = [device.take() for device in self._devices]
        graphs = tuple(recorded.graph for recorded in found)
        return Rehearsed(
            graphs,
            step.n_tokens * self._n_seqs,
            max(map(entries, graphs), default=0),
            seconds,
            any(recorded.reused for recorded in found),
            tuple(recorded.written for recorded in found),
            tuple(recorded.sent for recorded in found),
            tuple(recorded.crossed for recorded in found),
        )

    def _go_to(self, at: int) -> None:
        """Hold `at` tokens in each sequence."""
        if not self._memory:
            # nothing is ever held: each micro-batch is a text of its own
            return
        if at < self._held:
            with interrupt.deferred():
                kept = all(
                    self._llama.memory_seq_rm(self._memory, sequence, at, -1)
                    for sequence in range(self._n_seqs)
                )
                if kept:
                    self._held = at
                else:
                    # a state cannot go back
                    self._llama.memory_clear(self._memory, False)
                    self._held = 0
        if at == self._held:
            return
        while self._held < at:
            self._decode(min(self._most, at - self._held), "none", 1)
        for sequence in range(1, self._n_seqs):
            # what one has read, the others get from it
            self._llama.memory_seq_rm(self._memory, sequence, -1, -1)
            self._llama.memory_seq_cp(self._memory, 0, sequence, -1, -1)

    def _decode(self, n_tokens: int, outputs: str, n_seqs: int) -> float:
        """Seconds of the call."""
        if 0 < self._n_positions < self._held + n_tokens:
            raise UsageError(f"the model was made for {self._n_positions} tokens, and no more")
        batch, keep = _batch(n_seqs, n_tokens, self._held, outputs)
        keep[0][:] = self._random.integers(0, self._n_vocab, n_seqs * n_tokens)
        with interrupt.deferred(), muted():
            began = time.perf_counter()
            status = self._llama.decode(self._handle, batch)
            seconds = time.perf_counter() - began
        del keep
        for device in self._devices:
            device.check()
        if status:
            raise DecodeError(f"decoding failed: {reason(f'status {status}')}")
        if self._memory:
            self._held += n_tokens
        return seconds


def _batch(
    n_seqs: int, n_tokens: int, at: int, outputs: str
) -> tuple[Batch, list[NDArray[np.int32] | NDArray[np.uint64] | NDArray[np.int8]]]:
    """Tokens of all sequences, one sequence after the other, and what they stand in: the tokens
    first."""
    count = n_seqs * n_tokens
    tokens = np.zeros(count, np.int32)
    positions = np.tile(np.arange(at, at + n_tokens, dtype=np.int32), n_seqs)
    counts = np.ones(count, np.int32)
    sequences = np.repeat(np.arange(n_seqs, dtype=np.int32), n_tokens)
    steps = np.arange(count, dtype=np.uint64) * np.uint64(sequences.itemsize)
    places = steps + np.uint64(sequences.ctypes.data)
    wanted = np.full(count, outputs == "all", np.int8)
    wanted[n_tokens - 1 :: n_tokens] = outputs != "none"
    batch = Batch(
        n_tokens=count,
        token=tokens.ctypes.data,
        pos=positions.ctypes.data,
        n_seq_id=counts.ctypes.data,
        seq_id=places.ctypes.data,
        logits=wanted.ctypes.data,
    )
    return batch, [tokens, positions, counts, sequences, places, wanted]


def entries(graph: RecordedGraph) -> int:
    """Entries of the KV cache that the graph's attention looks at: the most of all its layers."""
    nodes = graph.rows[: graph.n_nodes]
    keys = graph.rows["ne"][nodes["src"][nodes["op"] == _FLASH, 1], 1]
    scores = nodes["ne"][nodes["op"] == _SOFT_MAX, 0]
    return int(max(keys.max(initial=0), scores.max(initial=0)))


def _equal(path: Path, params: ModelParams, n_devices: int) -> list[float]:
    n_layer = known_header(path).layers
    shares = [1.0] * n_devices
    return shares if n_layer is None else whole_layers(n_layer, params.n_gpu_layers, shares)
