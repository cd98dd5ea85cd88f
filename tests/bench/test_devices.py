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


def test_listing() -> None:
    assert Inventory().listing() == "Available devices:\n  (none)\n"
    assert Inventory(remote=(RPC0, RPC1)).listing() == (
        "Available devices:\n"
        "  RPC0: Some CPU at a:1 (7 MiB, 3 MiB free)\n"
        "  RPC1: Other CPU at b:2 (7 MiB, 3 MiB free)\n"
    )
