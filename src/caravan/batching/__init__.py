"""Continuous batching: many requests on one model at the same time."""

from __future__ import annotations

from caravan.batching.batcher import Batcher, BatcherState, SlotState, planned_context
from caravan.batching.job import Job
from caravan.batching.request import Chunk, Request, Token, Usage
from caravan.batching.streams import iterate, stream

# `caravan.stream` is a package
aiterate = stream

__all__ = [
    "Batcher",
    "BatcherState",
    "Chunk",
    "Job",
    "Request",
    "SlotState",
    "Token",
    "Usage",
    "aiterate",
    "iterate",
    "planned_context",
    "stream",
]
