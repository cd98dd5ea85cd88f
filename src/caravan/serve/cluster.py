"""`ClusterView`: what the page shows of the devices and of the work on them, sampled once a second.

One thread asks the workers and makes a snapshot; requests read the newest one and never wait.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Protocol

from caravan.backend import RemoteDevice
from caravan.batching import BatcherState
from caravan.errors import UsageError
from caravan.llm.devices import EngineDevice, cpu
from caravan.llm.model import Model
from caravan.llm.placement import CPU
from caravan.serve.gauge import Gauge, WorkerGauge
from caravan.serve.losses import LossLog
from caravan.serve.rates import Rates, rounded
from caravan.stream.routes import Path

_PERIOD = 1.0
# What is answered later counts for the next second.
_ANSWER_SECONDS = 0.25

_log = logging.getLogger(__name__)


class HasState(Protocol):
    """A Batcher, as seen from here."""

    def state(self) -> BatcherState: ...


class ClusterView:
    """See the module. Use it as a context manager, which has the sampling thread.

    It does not outlive the model and the batcher that it shows: close it first.
    """

    def __init__(
        self,
        model: Model,
        devices: Sequence[EngineDevice] | None = None,
        *,
        batcher: HasState | None = None,
        losses: LossLog | None = None,
        name: str = "",
    ) -> None:
        """Asks nothing yet.

        Args:
            devices: to be shown, in the order of the layers; the model's, if None.
            batcher: whose slots, queue and rates are shown.
            losses: that were got over.
            name: of the model; that of its file, if empty.
        """
        self._model = model
        self._batcher = batcher
        self._losses = losses or LossLog()
        self._name = name or model.path.name
        self._began = time.time()
        self._changing = False
        self._layers: list[str] = []
        self._used: set[str] = set()
        self._pairs: list[tuple[EngineDevice, EngineDevice]] = []
        self._rates = Rates()
        self._gauges = [_gauge(d) for d in (model.devices if devices is None else devices)]
        self._cpu = Gauge(cpu())
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="caravan-cluster-view")
        self._state = None if batcher is None else batcher.state()
        self._look_at_model()
        self._snapshot = self._made()

    def __repr__(self) -> str:
        return f"<ClusterView of {self._name}: {len(self._gauges)} devices>"

    def __enter__(self) -> ClusterView:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """End the thread, which takes a fraction of a second. The newest snapshot stays."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join()

    def snapshot(self) -> dict[str, Any]:
        """The newest one, for JSON; waits for nothing. It is shared: not to be changed."""
        return self._snapshot

    # the sampling thread

    def _run(self) -> None:
        due, told = time.monotonic(), False
        while not self._stop.wait(max(0.0, due - time.monotonic())):
            try:
                self.ask()
                self._stop.wait(_ANSWER_SECONDS)
                self.collect()
                told = False
            except Exception:
                # the page is no reason to end anything, and the next second may be better
                if not told:
                    _log.exception("the cluster cannot be shown")
                told = True
            # late ones are not made up for
            due = max(due + _PERIOD, time.monotonic())

    def ask(self) -> None:
        """Begin a second: questions to all workers."""
        for gauge in self._gauges:
            gauge.ask(self._rates.idle)

    def collect(self) -> None:
        """End it: what was answered goes into a new snapshot."""
        if self._batcher is not None:
            self._state = self._batcher.state()
            self._rates.add(self._state, time.monotonic())
        for gauge in self._gauges:
            gauge.collect()
        # with devices, the time of a step is theirs
        self._cpu.collect(None if self._model.devices else self._rates.busy)
        self._changing = not self._look_at_model()
        self._snapshot = self._made()

    def _look_at_model(self) -> bool:
        """Which layers are where; False while that changes."""
        model = self._model
        if not model.changing.acquire(blocking=False):
            return False
        try:
            self._used = {device.name for device in model.devices}
            self._pairs = list(itertools.pairwise(model.devices))
            self._layers = model.layer_devices()
        except UsageError:
            # layers that are cut are on all of them
            self._layers = []
        finally:
            model.changing.release()
        return True

    # the snapshot

    def _made(self) -> dict[str, Any]:
        gauges = list(self._gauges)
        if CPU in self._layers or not gauges:
            # the engine counts the layers of devices from the end
            gauges.insert(0, self._cpu)
        return {
            "time": round(time.time(), 3),
            "since": round(self._began, 3),
            "period": _PERIOD,
            "model": self._model_facts(),
            "devices": [self._device_facts(gauge) for gauge in gauges],
            "routes": self._routes(),
            "work": self._work(),
            "losses": self._losses.facts(),
        }

    def _model_facts(self) -> dict[str, Any]:
        model = self._model
        return {
            "name": self._name,
            "description": model.description,
            "size": model.size,
            "n_params": model.n_params,
            "n_layer": model.n_layer,
            "n_ctx_train": model.n_ctx_train,
            "changing": self._changing,
        }

    def _device_facts(self, gauge: Gauge) -> dict[str, Any]:
        facts = gauge.facts(self._planned() if gauge is self._cpu else None)
        own = [n for n, name in enumerate(self._layers[:-1]) if name == gauge.name]
        here = gauge is self._cpu or gauge.name in self._used
        facts["state"] = "lost" if facts["cause"] else "there" if here else "unused"
        facts["layers"] = [own[0], own[-1]] if own else None
        facts["output"] = self._layers[-1:] == [gauge.name]
        return facts

    def _planned(self) -> dict[str, int]:
        needs = self._model.needs
        if needs is None:
            return {} if self._model.devices else {"weights": self._model.size}
        host = needs.host
        return {"weights": host.weights, "kv": host.kv, "compute": host.compute}

    def _routes(self) -> list[dict[str, Any]]:
        """The ways from each stage to the next, as far as they are known: nothing is opened."""
        rows = []
        for one, other in self._pairs:
            if not (isinstance(one, RemoteDevice) and isinstance(other, RemoteDevice)):
                continue
            if one.link.stream.ended or other.link.stream.ended:
                continue
            route = one.route_to(other)
            within = route.path is Path.DIRECT and route.round_trip is None
            trip = None if route.round_trip is None else round(route.round_trip, 6)
            path = "within" if within else route.path.value
            names = {"source": one.name, "target": other.name}
            rows.append({**names, "path": path, "round_trip": trip, "reason": route.reason})
        return rows

    def _work(self) -> dict[str, Any] | None:
        state = self._state
        if state is None:
            return None
        return {
            "n_ctx": state.n_ctx,
            "slots": [asdict(slot) for slot in state.slots],
            "queued": state.queued,
            "finished": dict(state.finished),
            "refused": state.refused,
            "n_prompt": state.n_prompt,
            "n_cached": state.n_cached,
            "n_gen": state.n_gen,
            "prompt_rate": rounded(self._rates.prompt),
            "gen_rate": rounded(self._rates.gen),
            "error": None if state.error is None else str(state.error),
        }


def _gauge(device: EngineDevice) -> Gauge:
    return WorkerGauge(device) if isinstance(device, RemoteDevice) else Gauge(device)
