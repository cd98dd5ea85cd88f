"""Models and contexts of the engine, sampling and generation, on the CPU or over devices."""

from caravan.llm.context import Context, ContextParams, math_cores
from caravan.llm.devices import EngineDevice, LocalDevice, local_devices
from caravan.llm.generate import GenerationStats, generate
from caravan.llm.model import Model, ModelParams
from caravan.llm.sampling import Sampler, SamplingParams

__all__ = [
    "Context",
    "ContextParams",
    "EngineDevice",
    "GenerationStats",
    "LocalDevice",
    "Model",
    "ModelParams",
    "Sampler",
    "SamplingParams",
    "generate",
    "local_devices",
    "math_cores",
]
