"""The page's numbers of two real workers: at work, one of them killed, and back."""

from __future__ import annotations

import json
import signal

import caravan
from caravan.batching import Batcher, Request, iterate
from caravan.llm import ContextParams, Model, SamplingParams
from caravan.llm.resume import Resume
from caravan.serve import cluster
from caravan.serve.cluster import ClusterView
from caravan.serve.losses import LossLog
from e2e import tiny
from e2e.processes import kill, session_of, wait_for

PARAMS = ContextParams(n_ubatch=32)
REQUEST = Request(tuple(range(3, 23)), 60, SamplingParams(temp=0))


def states(view: ClusterView) -> list[str]:
    return [device["state"] for device in view.snapshot()["devices"]]


def newest(view: ClusterView) -> list[bool]:
    """Of which devices the last second is known."""
    return [device["busy"][-1] is not None for device in view.snapshot()["devices"]]


def test_two_workers_at_work_and_one_lost(tmp_path, monkeypatch):
    monkeypatch.setattr(cluster, "_PERIOD", 0.1)
    monkeypatch.setattr(cluster, "_ANSWER_SECONDS", 0.05)
    losses = LossLog()
    resume = Resume(on_wait=losses.on_wait, on_resume=losses.on_resume)
    with (
        caravan.LocalWorkers(2, threads=1) as workers,
        caravan.connect(workers.endpoints) as connected,
        Model(tiny.write(tmp_path / "t.gguf"), devices=connected.devices, resume=resume) as model,
        Batcher(model, n_slots=2, n_ctx=256, params=PARAMS) as batcher,
        ClusterView(model, batcher=batcher, losses=losses) as view,
    ):

        def ask() -> str:
            return "".join(chunk.text for chunk in iterate(batcher, REQUEST))

        def shown() -> bool:
            """One answer may be over before the first look."""
            assert ask() == answer
            devices = view.snapshot()["devices"]
            return any(view.snapshot()["work"]["gen_rate"]) and all(any(d["busy"]) for d in devices)

        answer = ask()
        wait_for(shown)
        seen = json.loads(json.dumps(view.snapshot()))
        assert [device["name"] for device in seen["devices"]] == ["RPC0", "RPC1"]
        assert seen["devices"][0]["layers"][0] == 0 and seen["devices"][1]["output"]
        for device in seen["devices"]:
            assert all(share is None or 0 <= share <= 1 for share in device["busy"])
            assert device["memory"]["used"]["weights"] > 0
            assert 0 < device["link"]["round_trip"] < 5
        (route,) = seen["routes"]
        assert (route["source"], route["target"], route["path"]) == ("RPC0", "RPC1", "direct")
        assert route["round_trip"] > 0
        # one stands still: the other's numbers go on, and so do its own afterwards
        still = session_of(workers.workers[0])
        kill(still, signal.SIGSTOP)
        wait_for(lambda: newest(view) == [False, True])
        kill(still, signal.SIGCONT)
        wait_for(lambda: newest(view) == [True, True])
        kill(workers.workers[1].pid)
        wait_for(lambda: states(view) == ["there", "lost"])
        assert view.snapshot()["devices"][1]["cause"]
        assert ask() == answer
        wait_for(lambda: states(view) == ["there", "there"])
        wait_for(lambda: view.snapshot()["losses"]["count"] == 1)
        wait_for(lambda: newest(view) == [True, True])
