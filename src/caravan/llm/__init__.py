"""Models, contexts, sampling and generation: the engine as Python objects.

Called by the commands, the bench and users. Takes devices that it does not know the inside of; the
workers' come from `caravan.backend`.
"""

from caravan.llm.advice import Suggestion
from caravan.llm.asynchronous import agenerate
from caravan.llm.chat import ChatTemplate
from caravan.llm.connecting import connect
from caravan.llm.context import Context
from caravan.llm.conversation import Chat
from caravan.llm.cores import physical_cores
from caravan.llm.devices import EngineDevice, LocalDevice, local_devices
from caravan.llm.embedding import Embedder
from caravan.llm.generation import GenerationStats, generate
from caravan.llm.grammar import json_grammar, json_schema_grammar
from caravan.llm.loading import DeviceLoad
from caravan.llm.model import Model
from caravan.llm.needs import DeviceNeeds, Needs
from caravan.llm.params import ContextParams, ModelParams
from caravan.llm.registering import Registration, register
from caravan.llm.resume import Resume, Resumed
from caravan.llm.sampling import Sampler, SamplingParams

__all__ = [
    "Chat",
    "ChatTemplate",
    "Context",
    "ContextParams",
    "DeviceLoad",
    "DeviceNeeds",
    "Embedder",
    "EngineDevice",
    "GenerationStats",
    "LocalDevice",
    "Model",
    "ModelParams",
    "Needs",
    "Registration",
    "Resume",
    "Resumed",
    "Sampler",
    "SamplingParams",
    "Suggestion",
    "agenerate",
    "connect",
    "generate",
    "json_grammar",
    "json_schema_grammar",
    "local_devices",
    "physical_cores",
    "register",
]
