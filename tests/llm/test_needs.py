"""How what a device needs is told: in lines that a terminal of 80 columns does not break."""

from __future__ import annotations

import pytest

from caravan.llm.needs import DeviceNeeds, size

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


def needs(weights: float, kv: float, compute: float, free: float, total: float) -> DeviceNeeds:
    sizes = (int(number) for number in (weights, kv, compute, free, total))
    return DeviceNeeds("RPC0", "lab1.example.org:50052", *sizes)


@pytest.mark.parametrize(
    ("device", "line"),
    [
        (
            needs(31.7 * MIB, 2.8 * MIB, 14 * MIB, 21.8 * GIB, 32 * GIB),
            "RPC0 needs 48.5 MiB: weights 31.7, KV 2.8, compute 14.0; free 21.8 GiB",
        ),
        (
            needs(11.6 * GIB, 640 * MIB, 30 * MIB, 23.1 * GIB, 24 * GIB),
            "RPC0 needs 12.3 GiB: weights 11.6, KV 0.6, compute <0.1; free 23.1 GiB",
        ),
        (
            needs(423.4 * MIB, 180.2 * MIB, 397 * MIB, 511.9 * MIB, 24 * GIB),
            "RPC0 needs 1001 MiB: weights 423, KV 180, compute 397; free 512 MiB",
        ),
        (needs(31.7 * MIB, 0, 0, 0, 0), "RPC0 needs 31.7 MiB: weights 31.7; free unknown"),
        (needs(0, 0, 0, 20 * MIB, 20 * MIB), "RPC0 gets no layers; free 20.0 MiB"),
    ],
)
def test_a_line_says_all_and_is_short(device, line):
    assert str(device) == line


def test_the_longest_usual_line_has_80_columns():
    device = needs(123 * MIB, 123 * MIB, 123 * MIB, 99.9 * GIB, 128 * GIB)
    assert len(f"caravan: {device}") <= 80


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0"), (1, "1 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (MIB - 1, "1024 KiB")],
)
def test_sizes(number, text):
    assert size(number) == text
