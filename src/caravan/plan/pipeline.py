"""`Pipeline`: a model's layers on some devices in an order, as numbers, for prediction.

What `simulator` and `predict` are given; made by the search for splits. Knows no engine.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from caravan.plan.profile import ClusterProfile
from caravan.plan.times import DeviceTimes


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes that travel.

    Attributes:
        activation: of a token, from one stage to the next.
        embedding: of a token, from the head to the first stage.
        fixed: of a graph's small inputs, to each stage, whatever its size.
        position: of a token's small inputs, to each stage.
        mask: of a token and an entry of the KV cache, to each stage.
        again: the share of all of them that travels when a decode step follows another.
        logits: of an output, to the head.
        graph: of a layer's part of a new graph, to its stage.
        nodes: no bytes: operations of a layer, which a stage checks in a new graph.
        alone: of a token, from the head to a stage that has all layers, on top: inputs that never
            change, which only a pipeline keeps where they are.
    """

    activation: float
    embedding: float
    fixed: float
    position: float
    mask: float
    again: float
    logits: float
    graph: float = 0.0
    nodes: float = 0.0
    alone: float = 0.0

    def inputs(self, n_tokens: int, n_kv: int, *, first: bool) -> float:
        """Of one micro-batch, from the head to a stage."""
        size = self.fixed + n_tokens * (self.position + n_kv * self.mask)
        return size + n_tokens * self.embedding if first else size


@dataclass(frozen=True, slots=True)
class HeadTimes:
    """Seconds that the head's thread takes for a micro-batch, all in all and for each stage more.

    Attributes:
        build, build_stage: where the graph is new.
        token: for each token of a new one.
        reuse, reuse_stage: where it is the last one again, as in decoding.
        sample: from the logits to the next token.
    """

    build: float
    build_stage: float
    token: float
    reuse: float
    reuse_stage: float
    sample: float = 0.0


@dataclass(frozen=True, slots=True)
class Setting:
    """What does not depend on which devices are used.

    Attributes:
        times: of each device of the cluster.
        n_layer: without the output layer.
        n_ubatch, n_batch, n_ctx: tokens, as in ContextParams.
    """

    cluster: ClusterProfile
    times: tuple[DeviceTimes, ...]
    traffic: Traffic
    head: HeadTimes
    n_layer: int
    n_ubatch: int = 512
    n_batch: int = 2048
    n_ctx: int = 4096


@dataclass(frozen=True, slots=True)
class Pipeline:
    """See the module.

    Attributes:
        devices: numbers in the cluster, in the order of the layers.
        counts: layers of each, the output layer counted with the last that has any.
    """

    setting: Setting
    devices: tuple[int, ...]
    counts: tuple[int, ...]

    @property
    def stages(self) -> list[tuple[int, int, int]]:
        """(device, first layer, end) of each device with layers; n_layer is the output layer."""
        ends = list(itertools.accumulate(self.counts))
        starts = [0, *ends[:-1]]
        return [s for s in zip(self.devices, starts, ends, strict=True) if s[1] < s[2]]
