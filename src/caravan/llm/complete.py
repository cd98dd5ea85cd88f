"""`complete`: one prompt on one model, and a report of where it ran and how fast.

What `caravan run` does, without its printing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from caravan.errors import UsageError
from caravan.llm.context import Context
from caravan.llm.devices import EngineDevice, cpu
from caravan.llm.generation import GenerationStats, generate, noted
from caravan.llm.loader import OnLoad
from caravan.llm.model import Model
from caravan.llm.needs import Needs
from caravan.llm.params import ContextParams, ModelParams
from caravan.llm.placement import CPU
from caravan.llm.resume import Resume, policy
from caravan.llm.sampling import SamplingParams
from caravan.llm.splitter import Splitter
from caravan.models.ledger import known_header
from caravan.worker.names import is_local

_CTX_STEP = 256


@dataclass(frozen=True, slots=True)
class DeviceReport:
    """What one device holds.

    Attributes:
        name, where: such as `RPC0` and `127.0.0.1:50052`; for a device of this machine, what it is.
        layers: layer numbers that it computes, the output counted as the one after the last.
        memory: bytes by use: weights, kv, compute; what is known of them.
    """

    name: str
    where: str
    layers: list[int]
    memory: dict[str, int]


@dataclass(frozen=True, slots=True)
class Report:
    """How a completion went."""

    stats: GenerationStats
    devices: list[DeviceReport]
    n_layer: int


def complete(
    path: str,
    prompt: str,
    *,
    max_tokens: int,
    devices: Sequence[EngineDevice] = (),
    model_params: ModelParams | None = None,
    context_params: ContextParams | None = None,
    sampling: SamplingParams | None = None,
    on_text: Callable[[str], None],
    on_progress: Callable[[float], bool] | None = None,
    on_load: OnLoad | None = None,
    on_needs: Callable[[Needs], None] | None = None,
    fit: bool = True,
    resume: bool | Resume = False,
    splitter: Splitter | None = None,
) -> Report:
    """Load `path` on `devices`, continue `prompt` and give each piece of text to `on_text`.

    A context size of 0 becomes what prompt and answer need, or the model's own when the answer
    has no bound. What the model will take of the devices is given to `on_needs` before it is
    loaded, unless `fit` is off. A `splitter` splits the model as for `Model`. With
    `resume`, losses of workers are got over from the loading on;
    the report's statistics have them.

    Raises what Model, Context and generate raise, and UsageError for a context that is smaller than
    the prompt.
    """
    stats = GenerationStats()
    wanted = noted(policy(resume), stats)
    given = context_params or ContextParams()
    planned = _planned(path, prompt, given, max_tokens) if devices and fit else None
    with Model(
        path,
        model_params,
        devices=devices,
        progress=on_progress,
        on_load=on_load,
        context=planned,
        fit=fit,
        on_needs=on_needs,
        resume=wanted or False,
        splitter=splitter,
    ) as model:
        tokens = model.tokenize(prompt)
        params = _sized(planned or given, len(tokens), max_tokens, model, model.n_ctx_train)
        with Context(model, params) as context:
            for piece in generate(
                context,
                tokens,
                max_tokens=max_tokens,
                sampling=sampling,
                stats=stats,
                resume=policy(resume) or False,
            ):
                on_text(piece)
            return Report(stats, _reports(model), model.n_layer)


def _planned(path: str, prompt: str, given: ContextParams, max_tokens: int) -> ContextParams | None:
    """The context, before the model is loaded: how much memory it takes must be known before the
    weights leave. None where the file does not say enough."""
    if given.n_ctx:
        return given
    with Model(path, ModelParams(vocab_only=True)) as words:
        length = known_header(words.path).context
        if length is None:
            return None
        return _sized(given, len(words.tokenize(prompt)), max_tokens, words, length)


def _sized(
    params: ContextParams, n_prompt: int, max_tokens: int, model: Model, n_ctx: int
) -> ContextParams:
    """For so many tokens; `n_ctx` is the most that the model was made for."""
    if params.n_ctx:
        # the engine's is larger: it rounds up
        if n_prompt > params.n_ctx and not model.is_recurrent:
            raise UsageError(
                f"a prompt of {n_prompt} tokens does not fit into a context of {params.n_ctx}"
            )
        return params
    if max_tokens >= 0:
        wanted = -(-(n_prompt + max_tokens + 1) // _CTX_STEP) * _CTX_STEP
        n_ctx = min(max(n_ctx, n_prompt + 1), wanted)
    return replace(params, n_ctx=n_ctx)


def _reports(model: Model) -> list[DeviceReport]:
    """Those of the devices, after that of the CPU if it computes layers too."""
    layers: dict[str, list[int]] = {}
    for layer, name in enumerate(model.layer_devices()):
        layers.setdefault(name, []).append(layer)
    reports = []
    if CPU in layers:
        # with devices, the engine does not say which weights are here
        memory = {} if model.devices else {"weights": model.size}
        reports.append(DeviceReport(CPU, cpu().description, layers[CPU], memory))
    for device in model.devices:
        allocated = getattr(device, "allocated", dict)
        endpoint = "" if is_local(device.name) else getattr(device, "endpoint", "")
        where = endpoint or device.description
        reports.append(DeviceReport(device.name, where, layers.get(device.name, []), allocated()))
    return reports
