"""Caravan: one GGUF model over several machines, prompts in a pipeline.

    >>> import caravan
    >>> with caravan.connect(["lab1:50052", "lab2:50052"]) as cluster:
    ...     with caravan.Model("smollm2", devices=cluster.devices) as model:
    ...         with caravan.Context(model) as context:
    ...             for piece in caravan.generate(context, "Once upon a time"):
    ...                 print(piece, end="")
    ...             print()

Names are looked up on first use, so that importing the package loads neither NumPy nor the engine.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from caravan.backend import Cluster, RemoteDevice, Timeline
    from caravan.batching import Batcher, Chunk, Request, aiterate, iterate
    from caravan.errors import CaravanError, DoesNotFit, StateError, WorkerLost
    from caravan.llm import (
        Chat,
        ChatTemplate,
        Context,
        ContextParams,
        DeviceLoad,
        Embedder,
        GenerationStats,
        Model,
        ModelParams,
        Needs,
        Registration,
        Resume,
        Resumed,
        SamplingParams,
        Suggestion,
        agenerate,
        connect,
        generate,
        json_grammar,
        json_schema_grammar,
        local_devices,
        register,
    )
    from caravan.transport.certificates import Tls
    from caravan.worker.local import LocalWorkers, Worker

_HOME = {
    "Batcher": "caravan.batching",
    "CaravanError": "caravan.errors",
    "Chat": "caravan.llm",
    "ChatTemplate": "caravan.llm",
    "Chunk": "caravan.batching",
    "Cluster": "caravan.backend",
    "Context": "caravan.llm",
    "ContextParams": "caravan.llm",
    "DeviceLoad": "caravan.llm",
    "DoesNotFit": "caravan.errors",
    "Embedder": "caravan.llm",
    "GenerationStats": "caravan.llm",
    "LocalWorkers": "caravan.worker.local",
    "Model": "caravan.llm",
    "ModelParams": "caravan.llm",
    "Needs": "caravan.llm",
    "Registration": "caravan.llm",
    "RemoteDevice": "caravan.backend",
    "Request": "caravan.batching",
    "Resume": "caravan.llm",
    "Resumed": "caravan.llm",
    "SamplingParams": "caravan.llm",
    "StateError": "caravan.errors",
    "Suggestion": "caravan.llm",
    "Timeline": "caravan.backend",
    "Tls": "caravan.transport.certificates",
    "Worker": "caravan.worker.local",
    "WorkerLost": "caravan.errors",
    "agenerate": "caravan.llm",
    "aiterate": "caravan.batching",
    "connect": "caravan.llm",
    "generate": "caravan.llm",
    "iterate": "caravan.batching",
    "json_grammar": "caravan.llm",
    "json_schema_grammar": "caravan.llm",
    "local_devices": "caravan.llm",
    "register": "caravan.llm",
}

__all__ = [
    "Batcher",
    "CaravanError",
    "Chat",
    "ChatTemplate",
    "Chunk",
    "Cluster",
    "Context",
    "ContextParams",
    "DeviceLoad",
    "DoesNotFit",
    "Embedder",
    "GenerationStats",
    "LocalWorkers",
    "Model",
    "ModelParams",
    "Needs",
    "Registration",
    "RemoteDevice",
    "Request",
    "Resume",
    "Resumed",
    "SamplingParams",
    "StateError",
    "Suggestion",
    "Timeline",
    "Tls",
    "Worker",
    "WorkerLost",
    "__version__",
    "agenerate",
    "aiterate",
    "connect",
    "generate",
    "iterate",
    "json_grammar",
    "json_schema_grammar",
    "local_devices",
    "register",
]


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'caravan' has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
