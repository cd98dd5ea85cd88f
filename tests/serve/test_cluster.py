"""Snapshots of played devices, model and batcher."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator

import pytest

from caravan.errors import UsageError
from caravan.serve import cluster
from caravan.serve.cluster import ClusterView
from caravan.serve.gauge import WorkerGauge
from caravan.serve.losses import LossLog
from serve.played import SECOND, PlayedBatcher, PlayedModel, Worker, loss, resumed
from wired import wait_until


@pytest.fixture
def workers(monkeypatch) -> Iterator[list[Worker]]:
    monkeypatch.setattr(cluster, "_gauge", WorkerGauge)
    workers = [Worker("RPC0"), Worker("RPC1")]
    yield workers
    for worker in workers:
        worker.close()


def of(workers: list[Worker], **more) -> tuple[PlayedModel, ClusterView]:
    model = PlayedModel(*(worker.device for worker in workers))
    return model, ClusterView(model, **more)


def second(view: ClusterView, workers: list[Worker], **more: int) -> dict:
    view.ask()
    for worker in workers:
        worker.work(**more)
        worker.answer()
    view.collect()
    return json.loads(json.dumps(view.snapshot()))


def test_two_devices_at_work(workers):
    batcher, losses = PlayedBatcher(), LossLog()
    _, view = of(workers, batcher=batcher, losses=losses, name="smol")
    first = json.loads(json.dumps(view.snapshot()))
    assert [device["state"] for device in first["devices"]] == ["there"] * 2
    second(view, workers)
    batcher.totals["n_gen"] += 7
    losses.on_resume(resumed(loss()))
    found = second(view, workers, computing=SECOND // 5)
    one, other = found["devices"]
    assert (one["name"], one["layers"], one["output"]) == ("RPC0", [0, 15], False)
    assert (other["name"], other["layers"], other["output"]) == ("RPC1", [16, 29], True)
    assert one["busy"][-1] == 0.2 and len(one["busy"]) == 60
    assert one["endpoint"] == "host:50052"
    assert found["model"]["name"] == "smol" and not found["model"]["changing"]
    assert found["work"]["gen_rate"][-1] > 0 and found["work"]["queued"] == 2
    assert found["work"]["slots"] == [
        {"lane": 0, "busy": True, "n_held": 12, "n_gen": 3, "reading": False}
    ]
    assert found["losses"]["count"] == 1


def test_one_is_lost_and_the_model_goes_on_without(workers):
    model, view = of(workers)
    second(view, workers)
    workers[1].rig.peer.close()
    wait_until(lambda: workers[1].rig.stream.lost)
    found = second(view, workers[:1])
    assert [device["state"] for device in found["devices"]] == ["there", "lost"]
    assert found["devices"][1]["cause"] and found["devices"][1]["layers"] == [16, 29]
    model.devices = model.devices[:1]
    found = second(view, workers[:1])
    assert [device["layers"] for device in found["devices"]] == [[0, 29], None]
    # it comes back, and the model stays where it is
    workers[1].come_back()
    found = second(view, workers)
    assert [device["state"] for device in found["devices"]] == ["there", "unused"]


def test_while_the_model_is_loaded_again_the_page_shows_what_was(workers):
    model, view = of(workers)
    before = second(view, workers)
    with model.changing:
        held = threading.Thread(target=second, args=(view, workers))
        held.start()
        held.join()
    found = view.snapshot()
    assert found["model"]["changing"]
    assert [d["layers"] for d in found["devices"]] == [d["layers"] for d in before["devices"]]
    assert not second(view, workers)["model"]["changing"]


def test_layers_that_are_cut_are_nowhere_in_particular(workers, monkeypatch):
    def refuse(model):
        raise UsageError("split mode row")

    monkeypatch.setattr(PlayedModel, "layer_devices", refuse)
    _, view = of(workers)
    found = second(view, workers)
    assert [device["layers"] for device in found["devices"]] == [None, None]
    assert [device["state"] for device in found["devices"]] == ["there"] * 2


def test_the_cpu_alone():
    batcher = PlayedBatcher()
    view = ClusterView(PlayedModel(), batcher=batcher)
    view.ask()
    view.collect()
    batcher.totals["busy_seconds"] += 1e9
    view.collect()
    (device,) = json.loads(json.dumps(view.snapshot()))["devices"]
    assert (device["name"], device["layers"], device["output"]) == ("CPU", [0, 29], True)
    assert device["endpoint"] is None and device["link"] is None
    assert device["memory"]["used"] == {"weights": 4000} and device["memory"]["total"] > 0
    assert device["busy"][-1] == 1.0


def test_the_thread_samples_survives_errors_and_ends(workers, monkeypatch, caplog):
    monkeypatch.setattr(cluster, "_PERIOD", 0.01)
    monkeypatch.setattr(cluster, "_ANSWER_SECONDS", 0.001)
    model, view = of(workers)
    times = set()
    with view:
        wait_until(lambda: times.add(view.snapshot()["time"]) or len(times) > 3)
        del model.n_layer
        wait_until(lambda: "cannot be shown" in caplog.text)
        model.n_layer = 31
        wait_until(lambda: view.snapshot()["model"]["n_layer"] == 31)
    assert caplog.text.count("cannot be shown") == 1
    assert not view._thread.is_alive()
    # a second end, and one without a beginning
    view.close()
    of(workers)[1].close()
