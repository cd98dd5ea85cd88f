"""A process that is llama.cpp's own client: llama-cpp-python's libraries through ctypes.

    python tests/interop/client.py LIBRARIES

Its steps (see `steps.py`) are the methods of `Client`. Uses nothing of Caravan.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from steps import pack, serve

# an assertion of the libraries would run a debugger over this process
os.environ["GGML_NO_BACKTRACE"] = "1"
os.environ["LLAMA_CPP_LIB_PATH"] = sys.argv[1]

from llama_cpp import llama_cpp as llama

# the copies that libllama has mapped: a second one would have a registry of its own
_rpc, _ggml = (
    ctypes.CDLL(str(Path(sys.argv[1], f"lib{name}.so.0"))) for name in ("ggml-rpc", "ggml")
)
_P, _N = ctypes.c_void_p, ctypes.c_size_t
_add_server = _rpc.ggml_backend_rpc_add_server
_add_server.restype, _add_server.argtypes = _P, (ctypes.c_char_p,)
_register = _ggml.ggml_backend_register
_register.restype, _register.argtypes = None, (_P,)
_dev_count, _dev_get = _ggml.ggml_backend_reg_dev_count, _ggml.ggml_backend_reg_dev_get
_dev_count.restype, _dev_count.argtypes = _N, (_P,)
_dev_get.restype, _dev_get.argtypes = _P, (_P, _N)

_TYPES = {"f32": 0, "f16": 1, "q4_0": 2, "q8_0": 8}
_FLASH = {"auto": -1, "off": 0, "on": 1}

_ERROR = 4


@llama.llama_log_callback
def _log(level: int, text: bytes, data: int) -> None:
    if level == _ERROR:
        os.write(2, text)


class Context:
    """A llama_context, and how many tokens each of its sequences holds."""

    def __init__(self, model: Any, options: dict[str, Any]) -> None:
        params = llama.llama_context_default_params()
        options = {"n_threads": 1, "n_threads_batch": 1, **options}
        params.flash_attn_type = _FLASH[options.pop("flash_attn", "auto")]
        for name in ("type_k", "type_v"):
            setattr(params, name, _TYPES[options.pop(name, "f16")])
        for name, value in options.items():
            setattr(params, name, value)
        self.handle = llama.llama_init_from_model(model, params)
        if not self.handle:
            raise RuntimeError("no context")
        self.n_past: dict[int, int] = {}

    def decode(self, tokens: Sequence[int], sequence: int) -> None:
        """In batches; the last token's logits are kept."""
        step = llama.llama_n_batch(self.handle)
        for start in range(0, len(tokens), step):
            self.decode_batch([(sequence, token) for token in tokens[start : start + step]])

    def decode_batch(self, pairs: Sequence[tuple[int, int]]) -> None:
        """(sequence, token) each; the logits of each sequence's last token are kept."""
        last = {sequence: i for i, (sequence, _) in enumerate(pairs)}
        batch = llama.llama_batch_init(len(pairs), 0, 1)
        try:
            batch.n_tokens = len(pairs)
            for i, (sequence, token) in enumerate(pairs):
                position = self.n_past.setdefault(sequence, 0)
                self.n_past[sequence] += 1
                batch.token[i], batch.pos[i] = token, position
                batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
                batch.logits[i] = last[sequence] == i
            status = llama.llama_decode(self.handle, batch)
        finally:
            llama.llama_batch_free(batch)
        if status:
            raise RuntimeError(f"llama_decode: {status}")

    @property
    def memory(self) -> Any:
        return llama.llama_get_memory(self.handle)

    def logits(self, n_vocab: int, i: int = -1) -> np.ndarray:
        """Of the i-th of those that were kept, counted from the end."""
        values = llama.llama_get_logits_ith(self.handle, i)
        return np.ctypeslib.as_array(values, (n_vocab,)).copy()


class Client:
    """One model and its contexts, by name. Every public method is a step."""

    def __init__(self) -> None:
        self._devices: list[int] = []
        self._model: Any = None
        self._contexts: dict[str, Context] = {}
        self._states: dict[str, Any] = {}

    def connect(self, endpoints: list[str]) -> dict[str, Any]:
        for endpoint in endpoints:
            registry = _add_server(endpoint.encode())
            if not registry:
                raise RuntimeError(f"{endpoint} has no devices")
            _register(registry)
            self._devices += [_dev_get(registry, i) for i in range(_dev_count(registry))]
        return {"devices": len(self._devices)}

    def load(
        self, path: str, split: Sequence[float] = (), n_gpu_layers: int = -1, repack: bool = False
    ) -> None:
        """Over all devices that are connected; with none, on the CPU."""
        params = llama.llama_model_default_params()
        devices = (_P * (len(self._devices) + 1))(*self._devices)
        params.devices = ctypes.addressof(devices)
        params.n_gpu_layers = n_gpu_layers
        params.use_extra_bufts = repack
        shares = (ctypes.c_float * llama.llama_max_devices())(*split)
        params.tensor_split = ctypes.cast(shares, ctypes.POINTER(ctypes.c_float))
        if not self._devices:
            params.main_gpu = -1
        self._model = llama.llama_model_load_from_file(path.encode(), params)
        if not self._model:
            raise RuntimeError(f"cannot load {path}")
        self._vocab = llama.llama_model_get_vocab(self._model)
        self._n_vocab = llama.llama_vocab_n_tokens(self._vocab)

    def names(self) -> dict[str, Any]:
        """Of all ops and of all types, by their numbers."""
        answer: dict[str, Any] = {}
        for kind, count in (("op", 101), ("type", 43)):
            name = getattr(_ggml, f"ggml_{kind}_name")
            name.restype, name.argtypes = ctypes.c_char_p, (ctypes.c_int,)
            answer[kind] = [(name(number) or b"").decode() for number in range(count)]
        return answer

    def tokenize(self, text: str) -> dict[str, Any]:
        data = text.encode()
        tokens = (ctypes.c_int32 * (len(data) + 8))()
        args = (data, len(data), tokens, len(tokens), True, True)
        return {"tokens": tokens[: llama.llama_tokenize(self._vocab, *args)]}

    def open(self, context: str = "", **options: Any) -> None:
        self._contexts[context] = Context(self._model, options)

    def decode(self, tokens: list[int], context: str = "", sequence: int = 0) -> None:
        self._contexts[context].decode(tokens, sequence)
        llama.llama_synchronize(self._contexts[context].handle)

    def decode_together(self, tokens: list[list[int]], context: str = "") -> dict[str, Any]:
        """A list for each sequence, in one batch; the logits after each."""
        at = self._contexts[context]
        longest = max(map(len, tokens))
        pairs = [(s, t[i]) for i in range(longest) for s, t in enumerate(tokens) if i < len(t)]
        at.decode_batch(pairs)
        return {"logits": [pack(at.logits(self._n_vocab, -1 - i)) for i in range(len(tokens))]}

    def copy(self, source: int, target: int, context: str = "") -> None:
        """What one sequence holds, to another one."""
        at = self._contexts[context]
        llama.llama_memory_seq_cp(at.memory, source, target, -1, -1)
        at.n_past[target] = at.n_past[source]

    def shift(self, n: int, context: str = "") -> None:
        """Forget the first `n` tokens of the first sequence, and move the others up."""
        at = self._contexts[context]
        if not llama.llama_memory_seq_rm(at.memory, 0, 0, n):
            raise RuntimeError("llama_memory_seq_rm: refused")
        llama.llama_memory_seq_add(at.memory, 0, n, -1, -n)
        at.n_past[0] -= n

    def generate(
        self, n: int, context: str = "", sequence: int = 0, keep: bool = False
    ) -> dict[str, Any]:
        """Greedily; the logits after each step too if `keep`."""
        at = self._contexts[context]
        tokens: list[int] = []
        seen: list[str] = []
        for _ in range(n):
            tokens.append(int(at.logits(self._n_vocab).argmax()))
            at.decode(tokens[-1:], sequence)
            if keep:
                seen.append(pack(at.logits(self._n_vocab)))
        llama.llama_synchronize(at.handle)
        return {"tokens": tokens, "text": self._text(tokens), "logits": seen}

    def _text(self, tokens: list[int]) -> str:
        piece = ctypes.create_string_buffer(64)
        made = b""
        for token in tokens:
            size = llama.llama_token_to_piece(self._vocab, token, piece, len(piece), 0, True)
            made += piece.raw[: max(0, size)]
        return made.decode(errors="replace")

    def logits(self, context: str = "") -> dict[str, Any]:
        return {"logits": pack(self._contexts[context].logits(self._n_vocab))}

    def clear(self, context: str = "") -> None:
        at = self._contexts[context]
        llama.llama_memory_clear(at.memory, False)
        at.n_past.clear()

    def save(self, name: str, context: str = "", sequence: int = 0) -> dict[str, Any]:
        at = self._contexts[context]
        size = llama.llama_state_seq_get_size(at.handle, sequence)
        data = (ctypes.c_uint8 * size)()
        got = llama.llama_state_seq_get_data(at.handle, data, size, sequence)
        self._states[name] = (data, got, at.n_past[sequence])
        return {"size": got}

    def restore(self, name: str, context: str = "", sequence: int = 0) -> None:
        data, size, n_past = self._states[name]
        at = self._contexts[context]
        if not llama.llama_state_seq_set_data(at.handle, data, size, sequence):
            raise RuntimeError("llama_state_seq_set_data: refused")
        at.n_past[sequence] = n_past

    def close(self, context: str = "") -> None:
        llama.llama_free(self._contexts.pop(context).handle)

    def unload(self) -> None:
        for name in list(self._contexts):
            self.close(name)
        llama.llama_model_free(self._model)


def main() -> None:
    llama.llama_log_set(_log, None)
    llama.llama_backend_init()
    client = Client()
    serve({name: getattr(client, name) for name in dir(client) if not name.startswith("_")})


if __name__ == "__main__":
    main()
