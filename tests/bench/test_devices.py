"""Names of devices, and what is told about them."""

from __future__ import annotations

import pytest

from bench.fakes import FakeDevice
from caravan.bench.devices import Inventory
from caravan.errors import UsageError

CUDA, IGPU = FakeDevice("CUDA0", "Some GPU"), FakeDevice("Vulkan0", "Small GPU")
RPC0, RPC1 = FakeDevice("RPC0", "Some CPU", "a:1"), FakeDevice("RPC1", "Other CPU", "b:2")
BOTH = Inventory((CUDA, IGPU), (CUDA,), (RPC0, RPC1), ("CUDA", "Vulkan"))


def test_pick() -> None:
    assert BOTH.pick(("auto",)) == (RPC0, RPC1, CUDA)
    assert BOTH.pick(("none",)) == ()
    assert BOTH.pick(("Vulkan0", "RPC1")) == (IGPU, RPC1)
    with pytest.raises(UsageError, match="no device 'RPC9'; there are: CUDA0, Vulkan0, RPC0, RPC1"):
        BOTH.pick(("RPC9",))
    with pytest.raises(UsageError, match="use --rpc"):
        Inventory().pick(("RPC0",))


def test_texts() -> None:
    assert BOTH.backends == "CUDA,Vulkan,RPC"
    assert BOTH.gpu_info == "Some GPU, Small GPU, a:1, b:2"
    assert Inventory().backends == "CPU"
    assert Inventory().gpu_info == ""
    assert Inventory(local_backends=("BLAS",)).backends == "BLAS"


def test_local_devices_are_picked_by_their_number_and_never_by_auto() -> None:
    one, two = (FakeDevice(f"local:CPU:1{n}", "My CPU", f"unix:/{n}") for n in ("", "#2"))
    inventory = Inventory((CUDA,), (CUDA,), (RPC0,), started=(one, two))
    assert inventory.pick(("auto",)) == (RPC0, CUDA)
    assert inventory.pick(("CUDA0", "local:CPU:1", "RPC0")) == (CUDA, one, RPC0)
    assert inventory.pick(("local:CPU:1", "RPC0", "local:CPU:1")) == (one, RPC0, two)
    assert inventory.gpu_info == "Some GPU, a:1, My CPU, My CPU"
    assert Inventory(started=(one,)).backends == "RPC"
    assert Inventory(started=(one,)).listing() == (
        "Available devices:\n  local:CPU:1: My CPU (7 MiB, 3 MiB free)\n"
    )


def test_the_cpu_is_no_device_of_a_list() -> None:
    with pytest.raises(UsageError, match="local:CPU is a worker on it"):
        BOTH.pick(("RPC0", "CPU"))


def test_listing() -> None:
    assert Inventory().listing() == "Available devices:\n  (none)\n"
    assert Inventory(remote=(RPC0, RPC1)).listing() == (
        "Available devices:\n"
        "  RPC0: Some CPU at a:1 (7 MiB, 3 MiB free)\n"
        "  RPC1: Other CPU at b:2 (7 MiB, 3 MiB free)\n"
    )
