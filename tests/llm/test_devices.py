"""The engine's own devices, told apart from the CPU and from the workers'."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from caravan.engine import layouts
from caravan.llm import devices
from caravan.llm.refusal import Refusals, reason
from llm.fakes import FakeDevice


@pytest.fixture
def registered(monkeypatch):
    """An engine with a device of each kind, and one of a worker."""
    table = [
        ("CUDA0", b"CUDA", layouts.DEVICE_TYPE_GPU),
        ("iGPU", b"Vulkan", layouts.DEVICE_TYPE_IGPU),
        ("BLAS", b"BLAS", layouts.DEVICE_TYPE_ACCEL),
        ("RPC0", b"RPC", layouts.DEVICE_TYPE_GPU),
        ("CPU", b"CPU", layouts.DEVICE_TYPE_CPU),
    ]
    ggml = SimpleNamespace(
        devices=lambda: list(range(len(table))),
        dev_name=lambda index: table[index][0].encode(),
        dev_description=lambda index: b"about " + table[index][0].encode(),
        dev_type=lambda index: table[index][2],
        dev_backend_reg=lambda index: index,
        reg_name=lambda index: table[index][1],
        dev_memory=lambda index: (index, index + 10),
    )
    monkeypatch.setattr(devices.engine, "load", lambda: SimpleNamespace(ggml=ggml))


def test_own_gpus_are_listed_and_workers_are_not(registered):
    found = devices.local_devices()
    assert [(d.name, d.description) for d in found] == [
        ("CUDA0", "about CUDA0"),
        ("iGPU", "about iGPU"),
    ]
    assert found[1].memory() == (1, 11)
    devices.check_all(tuple(found))


def test_reason_is_the_first_line_without_function_names(monkeypatch):
    lines = ["llama_model_load: error loading model: bad magic", "llama_x: failed to load model"]
    monkeypatch.setattr("caravan.engine.recent_errors", lambda: lines)
    assert reason("none") == "error loading model: bad magic"
    monkeypatch.setattr("caravan.engine.recent_errors", list)
    assert reason("none") == "none"


def test_old_refusal_is_not_taken_for_a_new_one():
    device = FakeDevice()
    device.allocation_error = OSError("old")
    refusals = Refusals((device,))
    assert refusals.cause() is None
    device.allocation_error = new = OSError("new")
    assert refusals.cause() is new
