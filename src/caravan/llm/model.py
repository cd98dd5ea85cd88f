"""`Model`: a GGUF file in the engine, its layers on the CPU and on the devices given.

Owns the llama_model and its vocabulary. Called by everything that computes; knows nothing of how a
device works, only that it can be lost.
"""

from __future__ import annotations

import ctypes
import os
import sys
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from caravan import engine, interrupt
from caravan.errors import ModelError, UsageError
from caravan.llm import orphans
from caravan.llm.advice import plan
from caravan.llm.devices import EngineDevice, check_all, check_count
from caravan.llm.fake import check_simulated, load_fake
from caravan.llm.loader import Loader, OnLoad, Progress
from caravan.llm.needs import Needs
from caravan.llm.params import ContextParams, ModelParams, c_model_params
from caravan.llm.placement import place_layers
from caravan.llm.planning import first_split
from caravan.llm.refusal import Refusals, reason
from caravan.models import resolve
from caravan.models.fake import described_size
from caravan.models.splits import parts

if TYPE_CHECKING:
    from caravan.llm.context import Context


class Model:
    """A loaded model. Use it as a context manager, or `close` it.

    Several contexts on several threads may use one model; `close` closes them first.

    Attributes:
        path: the file, or the first of several.
        parts: all files.
        params: as given.
        devices: those used, in the order of the layers; empty: the CPU alone.
        needs: what it and the planned context take of each device, as worked out beforehand; None
            where nothing was: no devices, only the vocabulary, a split mode that cuts layers.
        description: such as `llama 135M Q4_1`.
        size: bytes of all tensors.
        n_params, n_layer, n_embd, n_ctx_train, n_vocab: of the model.
        has_encoder, is_recurrent: what kind of model it is.
        bos: the beginning-of-sequence token, or None.
        add_bos: whether a prompt begins with it.
        handle: address of the llama_model; 0 once closed.
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
            fit: False: plan nothing, and leave it to the devices to refuse what is too much.
            on_needs: given `needs` before anything is sent, where there are any.

        Raises DoesNotFit, ModelError (no such file, not GGUF, refused by the engine), WorkerLost,
        UsageError and, after Ctrl-C, KeyboardInterrupt.
        """
        self.handle = 0
        self.contexts: weakref.WeakSet[Context] = weakref.WeakSet()
        self.path = resolve(path)
        self.params = params or ModelParams()
        self.parts = parts(self.path)
        self.devices = _used(tuple(devices), self.params)
        check_count(self.devices)
        self._fake_size = described_size(self.path)
        if self._fake_size:
            check_simulated(self.path, self.devices, self.params)
        check_all(self.devices)
        self.needs: Needs | None = None
        self.shares = self._plan(context, fit)
        if self.needs is not None and on_needs is not None:
            on_needs(self.needs)
        self._llama = engine.load().llama
        try:
            with interrupt.deferred():
                orphans.free_all()
                self.handle = self._load(Loader(self.devices, progress, on_load))
            # a write that is lost fails nothing in the engine
            check_all(self.devices)
        except BaseException:
            self.close()
            raise
        self._read_facts()

    def _plan(self, context: ContextParams | None, fit: bool) -> list[float]:
        """The devices' shares of the layers. Raises DoesNotFit."""
        if not fit or not self.devices or self.params.vocab_only:
            return first_split(self.path, self.devices, self.params)
        with interrupt.deferred():
            # what nobody uses any more takes no memory from this one
            orphans.free_all()
            split, self.needs = plan(self.path, self.params, self.devices, context)
        return split

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
            cause = refusals.cause()
            stopped = loader.stopped and "loading was stopped"
            said = loader.in_words(reason("no reason given"))
            why = cause or stopped or f"the engine cannot load it: {said}"
            raise ModelError(f"{self.path}: {why}") from cause
        return handle

    def _read_facts(self) -> None:
        llama, handle = self._llama, self.handle
        self.vocab: int = llama.model_get_vocab(handle)
        text = ctypes.create_string_buffer(256)
        llama.model_desc(handle, text, len(text))
        self.description = text.value.decode("utf-8", "replace")
        self.size: int = llama.model_size(handle)
        self.n_params: int = llama.model_n_params(handle)
        self.n_layer: int = llama.model_n_layer(handle)
        self.n_embd: int = llama.model_n_embd(handle)
        self.n_ctx_train: int = llama.model_n_ctx_train(handle)
        self.n_vocab: int = llama.vocab_n_tokens(self.vocab)
        self.has_encoder: bool = llama.model_has_encoder(handle)
        self.is_recurrent: bool = llama.model_is_recurrent(handle)
        bos: int = llama.vocab_bos(self.vocab)
        self.bos = bos if bos >= 0 else None
        self.add_bos: bool = llama.vocab_get_add_bos(self.vocab)

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

    def close(self) -> None:
        """Free it and its contexts. Does nothing the second time."""
        with interrupt.deferred():
            for context in list(self.contexts):
                context.close()
            handle, self.handle = self.handle, 0
            if handle:
                self._llama.model_free(handle)

    def require_open(self) -> int:
        """The handle; raises ModelError once the model is closed."""
        if not self.handle:
            raise ModelError(f"{self.path}: the model is closed")
        return self.handle

    def tokenize(
        self, text: str, *, add_special: bool = True, parse_special: bool = True
    ) -> list[int]:
        """The tokens of a text.

        `add_special` adds what the model wants around a prompt; `parse_special` takes the names of
        control tokens inside the text for those tokens.
        """
        self.require_open()
        data = text.encode("utf-8", "replace")
        count = len(data) + 8
        while True:
            tokens = (ctypes.c_int32 * count)()
            found = self._llama.tokenize(
                self.vocab, data, len(data), tokens, count, add_special, parse_special
            )
            if found >= 0:
                return tokens[:found]
            if -found <= count:
                raise ModelError(f"{self.path}: cannot tokenize a text of {len(data)} bytes")
            count = -found

    def piece(self, token: int, *, special: bool = False) -> bytes:
        """The bytes of a token, which may be part of a character; control tokens have none
        unless `special`."""
        self._check_token(token)
        size = 64
        while True:
            text = ctypes.create_string_buffer(size)
            found: int = self._llama.token_to_piece(self.vocab, token, text, size, 0, special)
            if found >= 0:
                return text.raw[:found]
            size = -found

    def is_eog(self, token: int) -> bool:
        """Whether generation ends with this token."""
        self._check_token(token)
        return bool(self._llama.vocab_is_eog(self.vocab, token))

    def _check_token(self, token: int) -> None:
        self.require_open()
        if not 0 <= token < self.n_vocab:
            # the engine would end the process
            raise UsageError(f"token {token} is not in the vocabulary of {self.n_vocab}")

    def chat_template(self) -> str | None:
        """The model's own chat template (Jinja), if it has one."""
        text = self._llama.model_chat_template(self.require_open(), None)
        return None if text is None else text.decode("utf-8", "replace")

    def layer_devices(self) -> list[str]:
        """The device of each layer, the output layer last. UsageError for split modes that cut
        layers."""
        if self.params.split_mode not in ("layer", "none"):
            raise UsageError(f"split mode {self.params.split_mode} puts no layer on one device")
        names = [device.name for device in self.devices]
        # layers for speculative decoding stand behind the model's own, and are placed with them
        extra = self._llama.model_n_layer_nextn(self.require_open())
        placed = place_layers(self.n_layer + extra, self.params.n_gpu_layers, names, self.shares)
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
