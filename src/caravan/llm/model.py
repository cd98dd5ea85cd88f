"""`Model`: a GGUF file in the engine, its layers on the CPU and on the devices given.

Owns the llama_model and its vocabulary. Called by everything that computes; knows nothing of how a
device works, only that it can be lost.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import compress
from typing import TYPE_CHECKING

from caravan import engine, interrupt
from caravan.errors import ModelError, UsageError, WorkerLost
from caravan.llm import orphans, recovery
from caravan.llm.advice import plan
from caravan.llm.devices import EngineDevice, Hold, check_all, check_count
from caravan.llm.fake import check_simulated, load_fake
from caravan.llm.loader import Loader, OnLoad, Progress
from caravan.llm.needs import Needs
from caravan.llm.params import POOLINGS, ContextParams, ModelParams, c_model_params
from caravan.llm.placement import place_layers
from caravan.llm.planning import first_split
from caravan.llm.refusal import Refusals, reason
from caravan.llm.resume import Losses, Resume, Resumed, is_refusal, policy
from caravan.llm.splitter import Splitter
from caravan.llm.vocabulary import Vocabulary
from caravan.models import resolve
from caravan.models.fake import described_size
from caravan.models.splits import parts

if TYPE_CHECKING:
    from caravan.llm.raw import RawContext


class Model:
    """A loaded model. Use it as a context manager, or `close` it.

    Several contexts on several threads may use one model; `close` closes them first.

    Attributes:
        path: the file, or the first of several.
        parts: all files.
        params: as given.
        devices: those used, in the order of the layers; empty: the CPU alone. Fewer after a loss
            that was got over without a worker.
        holds: what it has on them, which may be lost.
        resume: what is done when a device is lost; None: WorkerLost is raised.
        needs: what it and the planned context take of each device, as worked out beforehand; None
            where nothing was: no devices, only the vocabulary, a split mode that cuts layers.
        description: such as `llama 135M Q4_1`.
        size: bytes of all tensors.
        n_params, n_layer, n_embd, n_ctx_train, n_vocab: of the model.
        n_embd_out: numbers of an embedding.
        has_encoder, is_recurrent: what kind of model it is.
        is_causal: a token knows those before it only, as its file says.
        pooling: how its file says that embeddings of tokens become one; empty where it does not.
        bos, eos: the tokens that begin and end a sequence, or None.
        add_bos: whether a prompt begins with `bos`.
        handle: address of the llama_model; 0 once closed. Another one after a loss.
        n_loads: how often it was loaded.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        params: ModelParams | None = None,
        *,
        devices: Sequence[EngineDevice] = (),
        progress: Progress | None = None,
        on_load: OnLoad | None = None,
        context: ContextParams | None = None,
        fit: bool = True,
        on_needs: Callable[[Needs], None] | None = None,
        resume: bool | Resume = False,
        splitter: Splitter | None = None,
    ) -> None:
        """Load it; blocks. `path` may be the name of a sample, which is fetched on first use.

        What it will take of the devices' memory is worked out before anything is sent to them. The
        default split leaves room for the KV cache and the compute buffers of a context.

        Args:
            progress: called with 0.0 to 1.0; stops the loading by answering False.
            on_load: called some ten times a second, and once more at the end, with how far each
                device of a worker is, and where its weights came from.
            context: what the memory is planned for. Without one it is a context of 4096 tokens, or
                of as many as the model was made for, and only weights that do not fit are refused.
            fit: False: leave it to the devices to refuse what is too much.
            on_needs: given `needs` before anything is sent, where there are any.
            resume: whether to go on when a worker is lost, here and in the contexts that do not
                say otherwise. Then `progress` and `on_load` are called once more for each load.
            splitter: decides how many layers each of several devices gets, where `params` do not
                say it; asked again after a loss, if there are fewer. Without one, or where it has
                no split that fits, it goes by free memory.

        Raises DoesNotFit, ModelError (no such file, not GGUF, refused by the engine), WorkerLost,
        UsageError and, after Ctrl-C, KeyboardInterrupt; and what the splitter raises.
        """
        self.handle = 0
        self.n_loads = 0
        self.contexts: weakref.WeakSet[RawContext] = weakref.WeakSet()
        # held by who frees it, loads it again, or makes a context of it; before those of contexts
        self.changing = threading.RLock()
        self.path = resolve(path)
        self.params = params or ModelParams()
        self.resume = policy(resume)
        self.parts = parts(self.path)
        self.devices = _used(tuple(devices), self.params)
        check_count(self.devices)
        self._fake_size = described_size(self.path)
        if self._fake_size:
            check_simulated(self.path, self.devices, self.params)
        self.needs: Needs | None = None
        self.holds: tuple[Hold, ...] = ()
        self._words: Vocabulary | None = None
        self._lost: WorkerLost | None = None
        self._closing = threading.Event()
        self.shares: list[float] = []
        self._context, self._fit, self._splitter = context, fit, splitter
        self._largest: ContextParams | None = None
        self._unplanned = True
        self._progress, self._on_load, self._on_needs = progress, on_load, on_needs
        self._llama = engine.load().llama
        began = time.monotonic()
        try:
            check_all(self.devices)
            self.load()
        except WorkerLost as lost:
            if self.resume is None or is_refusal(lost):
                raise
            self._begin_again(lost, self.resume, began)

    def _begin_again(self, lost: WorkerLost, resume: Resume, began: float) -> None:
        losses = Losses()
        losses.add(lost, resume)
        back = recovery.bring_back(self, lost, resume, losses, self._closing)
        names = tuple(device.name for device in self.devices)
        seconds = time.monotonic() - began
        resume.tell(Resumed.of(lost, back.lost, back.gone, names, seconds, 0))

    def _plan(self) -> list[float]:
        """The devices' shares of the layers. Raises DoesNotFit."""
        if not self.devices or self.params.vocab_only:
            return first_split(self.path, self.devices, self.params)
        with interrupt.deferred():
            # what nobody uses any more takes no memory from this one
            orphans.free_all()
            context = self._context or self._largest
            split, self.needs = plan(
                self.path, self.params, self.devices, context, self._splitter, fit=self._fit
            )
        return split

    def load(self) -> None:
        """Load it as it was planned. For `recovery`, and to begin with."""
        if self._unplanned:
            self.shares = self._plan()
            self._unplanned = False
            if self.needs is not None and self._on_needs is not None:
                self._on_needs(self.needs)
        self.holds = tuple(device.hold() for device in self.devices)
        try:
            with interrupt.deferred():
                orphans.free_all()
                self.handle = self._load(Loader(self.devices, self._progress, self._on_load))
            # a write that is lost fails nothing in the engine
            check_all(self.holds)
            self._read_facts()
            self.n_loads += 1
        except BaseException:
            self._free()
            raise

    def _load(self, loader: Loader) -> int:
        refusals = Refusals(self.devices)
        split = replace(self.params, tensor_split=tuple(self.shares))
        c_params, keep = c_model_params(split, self.devices)
        if self._fake_size:
            handle = loader.simple(
                lambda: load_fake(self.path, self._fake_size, self.devices, c_params), c_params
            )
        else:
            handle = loader.load(self.parts, self.params, c_params)
        del keep
        # to be freed if anything is raised from here on
        self.handle = handle
        if loader.error is not None:
            raise loader.error
        if not handle or loader.stopped:
            check_all(self.holds)
            cause = refusals.cause()
            stopped = loader.stopped and "loading was stopped"
            said = loader.in_words(reason("no reason given"))
            why = cause or stopped or f"the engine cannot load it: {said}"
            raise ModelError(f"{self.path}: {why}") from cause
        return handle

    def _read_facts(self) -> None:
        llama, handle = self._llama, self.handle
        if self._words is None:
            self._words = Vocabulary(self.path, handle)
        text = ctypes.create_string_buffer(256)
        llama.model_desc(handle, text, len(text))
        self.description = text.value.decode("utf-8", "replace")
        self.size: int = llama.model_size(handle)
        self.n_params: int = llama.model_n_params(handle)
        self.n_layer: int = llama.model_n_layer(handle)
        # layers for speculative decoding stand behind the model's own, and are placed with them
        self._n_extra: int = llama.model_n_layer_nextn(handle)
        self.n_embd: int = llama.model_n_embd(handle)
        self.n_embd_out: int = llama.model_n_embd_out(handle)
        self.n_ctx_train: int = llama.model_n_ctx_train(handle)
        self.has_encoder: bool = llama.model_has_encoder(handle)
        self.is_recurrent: bool = llama.model_is_recurrent(handle)
        self.is_causal = self._said("attention.causal") != "false"
        poolings = {str(number): word for word, number in POOLINGS.items()}
        self.pooling = poolings.get(self._said("pooling_type"), "")
        words = self._words
        self.n_vocab, self.bos, self.eos = words.size, words.bos, words.eos
        self.add_bos = words.add_bos

    def _said(self, key: str) -> str:
        """What its file says of its architecture; empty where it says nothing."""
        arch = self._value("general.architecture")
        return self._value(f"{arch}.{key}")

    def _value(self, key: str) -> str:
        text = ctypes.create_string_buffer(128)
        self._llama.model_meta_val_str(self.handle, key.encode(), text, len(text))
        return text.value.decode("utf-8", "replace")

    def __repr__(self) -> str:
        where = ", ".join(device.name for device in self.devices) or "CPU"
        state = f"{self.description} on {where}" if self.handle else "closed"
        return f"<Model {self.path.name}: {state}>"

    def __enter__(self) -> Model:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "handle", 0) and not sys.is_finalizing():
            orphans.leave(self._llama.model_free, self.handle)

    def give_up(self) -> None:
        """Before it is closed, from any thread: a lost worker is waited for no longer, and whoever
        did that gets WorkerLost."""
        self._closing.set()

    def close(self) -> None:
        """Free it and its contexts. Does nothing the second time."""
        self.give_up()
        with self.changing:
            self._lost = None
            if self._words is not None:
                self._words.close()
            self._free()

    def _free(self, lost: WorkerLost | None = None) -> None:
        with interrupt.deferred():
            for context in list(self.contexts):
                context.close(lost)
            # a context that was dropped must go before its model
            orphans.free_all()
            handle, self.handle = self.handle, 0
            if handle:
                self._llama.model_free(handle)

    def require_open(self) -> int:
        """The handle; raises ModelError once the model is closed, and WorkerLost while it is
        nowhere because of a loss."""
        if not self.handle:
            error = self._lost or ModelError(f"{self.path}: the model is closed")
            raise error.with_traceback(None)
        return self.handle

    def bring_back(self, lost: WorkerLost, resume: Resume, losses: Losses) -> recovery.Back:
        """Be there again after a loss, with other contexts; blocks. Another thread may have done
        it. Raises WorkerLost, with the outcome, where it cannot be done."""
        with self.changing:
            if self._is_whole():
                return recovery.Back((), {})
            if self._closing.is_set():
                raise lost.but("the model was closed")
            self.words.outlive(self._load_words)
            self._lost = lost
            self._free(lost)
            back = recovery.bring_back(self, lost, resume, losses, self._closing)
            # its frames hold this model
            self._lost = None
            return back

    def _is_whole(self) -> bool:
        try:
            check_all(self.holds)
        except WorkerLost:
            return False
        return bool(self.handle)

    def _load_words(self) -> int:
        params = ModelParams(vocab_only=True)
        c_params, _ = c_model_params(params, ())
        with interrupt.deferred():
            handle = Loader(()).load(self.parts, params, c_params)
        if not handle:
            raise ModelError(f"{self.path}: {reason('the engine cannot load it')}")
        return handle

    def put_on(self, devices: Sequence[EngineDevice]) -> None:
        """Plan it for some of its devices; `load` loads it. For `recovery`. Raises DoesNotFit."""
        before = self.devices, self.params, self.needs
        kept = [device in devices for device in self.devices]
        # shares that were given stay those of the devices that are left
        shares = tuple(compress(self.params.tensor_split, kept))
        self.params = replace(self.params, tensor_split=shares if any(shares) else ())
        self.devices, self.needs = tuple(devices), None
        try:
            self.shares = self._plan()
        except BaseException:
            self.devices, self.params, self.needs = before
            raise
        self._unplanned = False

    @property
    def words(self) -> Vocabulary:
        """Its vocabulary; raises ModelError once the model is closed."""
        if self._words is None or self._closing.is_set():
            raise ModelError(f"{self.path}: the model is closed")
        return self._words

    def serve(self, context: RawContext, params: ContextParams) -> None:
        """A context was made of it, which it frees before itself."""
        self.contexts.add(context)
        if self._largest is None or params.n_ctx > self._largest.n_ctx:
            self._largest = params

    def tokenize(
        self, text: str, *, add_special: bool = True, parse_special: bool = True
    ) -> list[int]:
        """The tokens of a text.

        `add_special` adds what the model wants around a prompt; `parse_special` takes the names of
        control tokens inside the text for those tokens.
        """
        return self.words.tokenize(text, add_special, parse_special)

    def piece(self, token: int, *, special: bool = False) -> bytes:
        """The bytes of a token, which may be part of a character; control tokens have none
        unless `special`."""
        return self.words.piece(token, special)

    def is_eog(self, token: int) -> bool:
        """Whether generation ends with this token."""
        return self.words.is_eog(token)

    def chat_template(self, name: str = "") -> str | None:
        """The model's own chat template (Jinja), if it has one; `tool_use` is the name of one for
        conversations with tools, which few models have."""
        return self.words.chat_templates.get(name)

    def layer_devices(self) -> list[str]:
        """The device of each layer, the output layer last. UsageError for split modes that cut
        layers."""
        if self.params.split_mode not in ("layer", "none"):
            raise UsageError(f"split mode {self.params.split_mode} puts no layer on one device")
        names = [device.name for device in self.devices]
        total = self.n_layer + self._n_extra
        placed = place_layers(total, self.params.n_gpu_layers, names, self.shares)
        return [*placed[: self.n_layer], placed[-1]]


def _used(devices: tuple[EngineDevice, ...], params: ModelParams) -> tuple[EngineDevice, ...]:
    if params.split_mode == "none" and devices:
        if params.main_gpu >= len(devices):
            raise UsageError(f"main_gpu {params.main_gpu}: there are {len(devices)} devices")
        # a negative number keeps all on the CPU
        return (devices[params.main_gpu],) if params.main_gpu >= 0 else ()
    if len(params.tensor_split) > len(devices):
        raise UsageError(f"{len(params.tensor_split)} shares for {len(devices)} devices")
    return devices
