"""`Metrics`: numbers for Prometheus. What a batcher counts itself, and what the page shows of the
devices, is looked at when somebody asks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

from caravan.batching import BatcherState, Usage
from caravan.serve.pages import View
from caravan.serve.running import Submits

_REQUEST_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_TOKEN_SECONDS = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5)


class Metrics:
    """See the module. Each app has its own.

    Args:
        view: of the devices; None: nothing is told of them.
    """

    def __init__(self, batcher: Submits, view: View | None = None) -> None:
        self._registry = registry = CollectorRegistry()
        self._http = Counter(
            "caravan_http_requests",
            "Answered requests by route and status.",
            ("method", "route", "status"),
            registry=registry,
        )
        self._seconds = self._histogram(
            "caravan_http_request_seconds", "From a request to the end of its answer.", "route"
        )
        self._first = self._histogram(
            "caravan_time_to_first_token_seconds", "From a request to its first token."
        )
        self._queued = self._histogram(
            "caravan_queue_seconds", "That a request has waited for a slot."
        )
        self._token = Histogram(
            "caravan_token_seconds",
            "A token after the first, the mean of an answer.",
            buckets=_TOKEN_SECONDS,
            registry=registry,
        )
        registry.register(_Looks(batcher, view))

    def _histogram(self, name: str, text: str, *labels: str) -> Histogram:
        return Histogram(name, text, labels, buckets=_REQUEST_SECONDS, registry=self._registry)

    def answered(self, method: str, route: str, status: int, seconds: float) -> None:
        """A request of HTTP is over."""
        self._http.labels(method, route, str(status)).inc()
        self._seconds.labels(route).observe(seconds)

    def ended(self, finish: str, use: Usage) -> None:
        """A request of a batcher is over."""
        self._queued.observe(use.queue_seconds)
        if use.n_gen:
            self._first.observe(use.queue_seconds + use.prompt_seconds)
        if use.n_gen > 1:
            self._token.observe(use.decode_seconds / (use.n_gen - 1))

    def text(self) -> tuple[bytes, str]:
        """All of it, and its content type."""
        return generate_latest(self._registry), CONTENT_TYPE_LATEST


class _Looks(Collector):
    def __init__(self, batcher: Submits, view: View | None) -> None:
        self._batcher = batcher
        self._view = view

    def describe(self) -> list[Metric]:
        """Nothing, so that it is not asked before somebody wants to know."""
        return []

    def collect(self) -> Iterator[Metric]:
        state = self._batcher.state()
        busy = sum(slot.busy for slot in state.slots)
        held = sum(slot.n_held for slot in state.slots)
        for name, text, value in (
            ("slots", "Requests that are computed at the same time.", len(state.slots)),
            ("slots_busy", "Slots that have a request.", busy),
            ("slot_tokens", "Tokens that a slot can hold.", state.n_ctx),
            ("tokens_held", "Tokens in all slots.", held),
            ("requests_queued", "Requests that wait for a slot.", state.queued),
            ("computing", "1, or 0 when nothing is computed any more.", state.error is None),
        ):
            yield GaugeMetricFamily(f"caravan_{name}", text, float(value))
        yield from _counters(state)
        if self._view is not None:
            yield from _of_devices(self._view.snapshot())


def _counters(state: BatcherState) -> Iterator[Metric]:
    for name, text, value in (
        ("requests_refused", "Requests that met a full queue.", state.refused),
        ("steps", "Calls of the engine.", state.n_steps),
        ("prompt_tokens", "Tokens of prompts that were read.", state.n_prompt),
        ("cached_tokens", "Tokens of prompts that a slot held already.", state.n_cached),
        ("generated_tokens", "Tokens that were generated.", state.n_gen),
        ("busy_seconds", "Spent computing, over all lanes.", state.busy_seconds),
    ):
        yield CounterMetricFamily(f"caravan_{name}", text, float(value))
    ended = CounterMetricFamily(
        "caravan_requests", "Ended requests by how they have ended.", labels=("finish",)
    )
    for finish, count in sorted(state.finished.items()):
        ended.add_metric((finish,), count)
    yield ended


def _of_devices(snapshot: dict[str, Any]) -> Iterator[Metric]:
    there = _gauge("device_there", "1, or 0 while it is lost or not used any more.", "device")
    busy = _gauge("device_busy_ratio", "Part of the last second spent computing.", "device")
    memory = _gauge("device_memory_bytes", "By use, and what is free.", "device", "use")
    for device in snapshot.get("devices", ()):
        name = device["name"]
        there.add_metric((name,), float(device["state"] == "there"))
        newest = device["busy"][-1:]
        if newest and newest[0] is not None:
            busy.add_metric((name,), newest[0])
        uses = {**device["memory"]["used"], "free": device["memory"]["free"]}
        for use, size in uses.items():
            memory.add_metric((name, use), float(size))
    yield from (there, busy, memory)
    losses = snapshot.get("losses", {}).get("count", 0)
    text = "Losses of workers that were got over."
    yield CounterMetricFamily("caravan_worker_losses", text, float(losses))


def _gauge(name: str, text: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"caravan_{name}", text, labels=labels)
