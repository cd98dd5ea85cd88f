"""`ModelService`: the `Service` that has a model behind it."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from caravan.batching import Batcher
from caravan.llm.chat import ChatTemplate
from caravan.llm.embedding import Embedder
from caravan.llm.grammar import json_schema_grammar
from caravan.llm.model import Model
from caravan.llm.params import ContextParams
from caravan.llm.sampling import SamplingParams
from caravan.llm.tools import ToolCalls, call_schema
from caravan.serve.no_batcher import NoBatcher
from caravan.serve.pages import View


class ModelService:
    """See the module. Close it before the batcher and the model, which are the caller's.

    Args:
        name: what clients call it.
        template: None: no chats.
        sampling: for what requests do not say.
        params: of the context for embeddings.
    """

    def __init__(
        self,
        model: Model,
        batcher: Batcher | NoBatcher,
        *,
        name: str,
        template: ChatTemplate | None = None,
        sampling: SamplingParams | None = None,
        params: ContextParams | None = None,
        view: View | None = None,
    ) -> None:
        self.model_name = name
        self.created = int(time.time())
        self.n_ctx = batcher.n_ctx
        self.template = template
        self.sampling = sampling or SamplingParams()
        self.batcher = batcher
        self.view = view
        self._model = model
        self._params = replace(params or ContextParams(), n_ctx=batcher.n_ctx)
        self._embedder: Embedder | None = None
        self._embedding = threading.Lock()

    def __enter__(self) -> ModelService:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Free the context for embeddings, if there is one."""
        with self._embedding:
            embedder, self._embedder = self._embedder, None
            if embedder is not None:
                embedder.close()

    @property
    def facts(self) -> Mapping[str, Any]:
        model = self._model
        return {
            "description": model.description,
            "size": model.size,
            "n_params": model.n_params,
            "n_vocab": model.n_vocab,
            "n_embd": model.n_embd,
            "n_ctx_train": model.n_ctx_train,
        }

    def tokenize(self, text: str, *, add_special: bool = True) -> list[int]:
        return self._model.tokenize(text, add_special=add_special)

    def piece(self, token: int) -> bytes:
        return self._model.piece(token, special=True)

    def split_calls(self, tools: Sequence[Mapping[str, Any]]) -> ToolCalls:
        return ToolCalls(self._call_source, tools)

    def call_grammar(self, tools: Sequence[Mapping[str, Any]], name: str) -> str:
        return json_schema_grammar(call_schema(self._call_source, tools, name))

    @property
    def _call_source(self) -> str:
        """What shows how the model writes calls."""
        template = self.template
        return "" if template is None else template.tool_source or template.source

    def embed(self, prompts: Sequence[Sequence[int]]) -> NDArray[np.float32]:
        with self._embedding:
            if self._embedder is None:
                # most servers are never asked, and it takes memory of the devices
                self._embedder = Embedder(self._model, self._params)
            return self._embedder.embed(prompts)

    def give_up(self) -> None:
        self._model.give_up()
