"""A process that is Caravan's head, with the steps of `client.py`.

    python tests/interop/head.py

Its engine is that of CARAVAN_LIBRARY.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from steps import pack, serve

import caravan
from caravan import engine
from caravan.llm import Context, ContextParams, Model, ModelParams


class Head:
    """One model and its contexts, by name. Every public method is a step."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._devices: Sequence[Any] = ()
        self._contexts: dict[str, Context] = {}
        self._states: dict[str, bytes] = {}

    def connect(self, endpoints: list[str], **options: Any) -> dict[str, Any]:
        cluster = self._stack.enter_context(caravan.connect(endpoints, **options))
        self._devices = cluster.devices
        self._cluster = cluster
        return {"devices": len(self._devices)}

    def paths(self) -> dict[str, Any]:
        """How copies go, for each pair of devices that has one."""
        routes = self._cluster.routes()
        return {"paths": {"-".join(pair): route.path.value for pair, route in routes.items()}}

    def load(
        self, path: str, split: Sequence[float] = (), n_gpu_layers: int = -1, repack: bool = False
    ) -> None:
        """Over all devices that are connected; with none, on the CPU."""
        params = ModelParams(n_gpu_layers=n_gpu_layers, tensor_split=tuple(split), repack=repack)
        self._model = self._stack.enter_context(Model(path, params, devices=self._devices))

    def tokenize(self, text: str) -> dict[str, Any]:
        return {"tokens": self._model.tokenize(text)}

    def open(self, context: str = "", **options: Any) -> None:
        params = ContextParams(n_threads=1, **options)
        self._contexts[context] = Context(self._model, params)

    def decode(self, tokens: list[int], context: str = "") -> None:
        self._contexts[context].decode(tokens)
        self._contexts[context].synchronize()

    def generate(self, n: int, context: str = "", keep: bool = False) -> dict[str, Any]:
        """Greedily; the logits after each step too if `keep`."""
        at = self._contexts[context]
        tokens: list[int] = []
        seen: list[str] = []
        for _ in range(n):
            tokens.append(int(at.logits().argmax()))
            at.decode_one(tokens[-1])
            if keep:
                seen.append(pack(at.logits()))
        at.synchronize()
        text = b"".join(self._model.piece(token, special=True) for token in tokens)
        return {"tokens": tokens, "text": text.decode(errors="replace"), "logits": seen}

    def logits(self, context: str = "") -> dict[str, Any]:
        return {"logits": pack(self._contexts[context].logits())}

    def clear(self, context: str = "") -> None:
        self._contexts[context].clear()

    def save(self, name: str, context: str = "") -> dict[str, Any]:
        self._states[name] = self._contexts[context].save_state()
        return {"size": len(self._states[name])}

    def restore(self, name: str, context: str = "") -> None:
        if not self._contexts[context].restore_state(self._states[name]):
            raise RuntimeError("the state is refused")

    def shift(self, n: int, context: str = "") -> None:
        """Forget the first `n` tokens, and move the others up: no verb of Caravan's own."""
        llama, add = engine.load().llama, engine.load().find("llama_memory_seq_add")
        add.restype = None
        add.argtypes = (ctypes.c_void_p, *[ctypes.c_int32] * 4)
        at = self._contexts[context]
        memory = llama.get_memory(at.handle)
        if not llama.memory_seq_rm(memory, 0, 0, n):
            raise RuntimeError("llama_memory_seq_rm: refused")
        add(memory, 0, n, -1, -n)
        at.n_past -= n

    def close(self, context: str = "") -> None:
        self._contexts.pop(context).close()

    def unload(self) -> None:
        """Everything, the connections too."""
        self._contexts.clear()
        self._stack.close()


def main() -> None:
    head = Head()
    serve({name: getattr(head, name) for name in dir(head) if not name.startswith("_")})


if __name__ == "__main__":
    main()
