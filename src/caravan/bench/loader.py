"""From a case to a loaded model and its contexts: the bench's words in the words of `llm`.

Implements the protocols of `bench.run`. The only room of the bench that calls `llm`.
"""

from __future__ import annotations

from collections.abc import Sequence

from caravan.backend.device import RemoteDevice
from caravan.bench.plan import Case
from caravan.bench.result import ModelFacts
from caravan.llm import Context, ContextParams, EngineDevice, Model, ModelParams
from caravan.llm.loader import OnLoad
from caravan.llm.splitter import Splitter

_FLASH = {1: "on", 0: "off", -1: "auto"}


def model_params(case: Case, n_devices: int) -> ModelParams:
    """The model-level options of a case that runs on so many devices."""
    # One split may serve several sets of devices: the shares of devices that a set lacks are left
    # out, and what remains says nothing if it has no share above 0.
    split = case.tensor_split[:n_devices]
    return ModelParams(
        n_gpu_layers=case.n_gpu_layers,
        split_mode=case.split_mode,
        main_gpu=case.main_gpu,
        tensor_split=split if any(split) else (),
        load_mode=case.load_mode,
        lazy_mode=case.lazy_mode,
        repack=case.repack,
        no_host=case.no_host,
        overrides=(*case.tensor_buft_overrides, *_experts_on_cpu(case.n_cpu_moe)),
    )


def _experts_on_cpu(layers: int) -> list[tuple[str, str]]:
    # The names that llama.cpp gives to the expert weights of a layer.
    return [
        (rf"blk\.{layer}\.ffn_(up|down|gate|gate_up)_(ch|)exps", "CPU") for layer in range(layers)
    ]


def context_params(case: Case) -> ContextParams:
    """The context-level options of a case."""
    return ContextParams(
        n_ctx=case.n_ctx,
        n_batch=case.n_batch,
        n_ubatch=case.n_ubatch,
        n_threads=case.n_threads,
        n_threads_batch=case.n_threads,
        type_k=case.type_k,
        type_v=case.type_v,
        flash_attn=_FLASH[case.flash_attn],
        offload_kqv=not case.no_kv_offload,
        embeddings=case.embeddings,
        op_offload=not case.no_op_offload,
        swa_full=False,
    )


class LlmModel:
    """A `BenchModel` over `llm.Model`."""

    def __init__(
        self,
        case: Case,
        devices: Sequence[EngineDevice],
        on_load: OnLoad | None = None,
        fit: bool = True,
        splitter: Splitter | None = None,
    ) -> None:
        self._model = Model(
            case.model,
            model_params(case, len(devices)),
            devices=devices,
            on_load=on_load,
            context=context_params(case),
            fit=fit,
            splitter=splitter,
        )

    @property
    def facts(self) -> ModelFacts:
        return ModelFacts(self._model.description, self._model.size, self._model.n_params)

    @property
    def n_vocab(self) -> int:
        return self._model.n_vocab

    @property
    def bos(self) -> int | None:
        return self._model.bos if self._model.add_bos else None

    def context(self, case: Case) -> LlmContext:
        for device in self._model.devices:
            if isinstance(device, RemoteDevice):
                device.poll = case.poll
        return LlmContext(self._model, case)

    def close(self) -> None:
        self._model.close()


class LlmContext:
    """A `BenchContext` over `llm.Context`."""

    def __init__(self, model: Model, case: Case) -> None:
        self._context = Context(model, context_params(case))

    def decode(self, tokens: Sequence[int]) -> None:
        self._context.decode(tokens)

    def synchronize(self) -> None:
        self._context.synchronize()

    def clear(self) -> None:
        self._context.clear()

    def save(self) -> bytes:
        return self._context.save_state()

    def restore(self, state: bytes) -> bool:
        return self._context.restore_state(state)

    def close(self) -> None:
        self._context.close()
