"""`NoBatcher`: in the place of a batcher, for a model that only makes vectors of texts."""

from __future__ import annotations

from caravan.batching import BatcherState, Job, Request
from caravan.batching.batcher import slot_size
from caravan.batching.job import Sink
from caravan.errors import NoConversations
from caravan.llm.model import Model


class NoBatcher:
    """See the module.

    Attributes:
        n_ctx: tokens of a text.
        capacity: requests at a time: what is wrong with them is not their number.
        error: it never fails.
    """

    capacity = 1 << 30
    error = None

    def __init__(self, model: Model, n_ctx: int) -> None:
        self.n_ctx = slot_size(n_ctx, model.n_ctx_train)

    def __enter__(self) -> NoBatcher:
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def submit(self, request: Request, sink: Sink) -> Job:
        raise NoConversations("this model makes embeddings, and continues no texts")

    def state(self) -> BatcherState:
        return BatcherState(self.n_ctx, (), 0, {}, 0, 0, 0, 0, 0, 0.0, None)
