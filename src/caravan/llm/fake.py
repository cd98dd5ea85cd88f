"""Loading a model that has no weights: on simulated devices, and on nothing else.

Anything that computes would turn out garbage, at the price of the real thing.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

from caravan import engine
from caravan.engine.hollow import load_hollow
from caravan.errors import ModelError
from caravan.llm.devices import EngineDevice
from caravan.llm.params import ModelParams
from caravan.models.ledger import known_header


def check_simulated(path: Path, devices: tuple[EngineDevice, ...], params: ModelParams) -> None:
    """Raises ModelError unless all layers will be on devices that only cost time."""
    if params.vocab_only:
        return
    layers = known_header(path).layers
    real = next((device for device in devices if not device.simulated), None)
    if real is not None:
        why = f"{real.name} ({real.description}) is a real one"
    elif not devices:
        why = "here is none"
    elif layers is not None and 0 <= params.n_gpu_layers <= layers:
        why = f"only {params.n_gpu_layers} of its {layers + 1} layers would be on one"
    elif params.overrides:
        why = f"the tensors of {params.overrides[0][0]!r} would be elsewhere"
    else:
        return
    raise ModelError(
        f"{path} has no weights and runs only on simulated devices (caravan worker -d sim:…); {why}"
    )


def load_fake(path: Path, size: int, devices: tuple[EngineDevice, ...], c_params: Any) -> int:
    """The llama_model, or 0; `size` is that of the file with its data. Raises ModelError."""
    try:
        header = path.read_bytes()
    except OSError as exc:
        raise ModelError(f"{path}: {exc.strerror or exc}") from exc
    with ExitStack() as stack:
        for device in devices:
            stack.enter_context(device.without_weights())
        # without the last byte of the padding, it ends before the data
        return load_hollow(engine.load(), header[:-1], size, c_params)
