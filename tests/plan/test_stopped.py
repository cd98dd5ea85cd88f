"""Ctrl-C while a device is measured whose worker answers nothing any more."""

from __future__ import annotations

from caravan import interrupt
from caravan.llm import connect
from caravan.plan.probe import measure_device
from caravan.plan.scratch import Scratch
from caravan.stream.ticket import Ticket
from caravan.worker.local import Worker


def test_whoever_waits_for_a_device_looks_for_ctrl_c(monkeypatch):
    waited: list[tuple[str, object]] = []
    wait = Ticket.wait

    def noted(self, timeout=None, stop=None):
        waited.append((self.name, stop))
        return wait(self, timeout, stop)

    with Worker("sim:GFLOPS=100,GBPS=50") as worker, connect([worker.endpoint]) as cluster:
        (device,) = cluster.devices
        monkeypatch.setattr(Ticket, "wait", noted)
        with Scratch(device) as scratch:
            scratch.fence()
        measure_device(device)
    names = {name for name, stop in waited if stop is interrupt.pending}
    assert {"FENCE", "CLOCK", "MEMORY", "GET"} <= names
