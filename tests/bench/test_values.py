"""Readers: what a text stands for, and which texts stand for nothing."""

from __future__ import annotations

import pytest

from caravan.bench import values
from caravan.errors import UsageError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("512", (512,)),
        ("1,2,4", (1, 2, 4)),
        ("1, 2,", (1, 2)),
        ("4-7", (4, 5, 6, 7)),
        ("4-9+2", (4, 6, 8)),
        ("1-16*2", (1, 2, 4, 8, 16)),
        ("3-100*3,7", (3, 9, 27, 81, 7)),
        ("5-5", (5,)),
        ("4-4*1", (4,)),
        ("0", (0,)),
    ],
)
def test_integers_and_ranges(text: str, expected: tuple[int, ...]) -> None:
    assert values.integers()(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        ",",
        "1,,2",
        "x",
        "1.5",
        "5-3",
        "0-8*2",
        "1-8*1",
        "1-8+0",
        "1-3|2",
        "-1",
        "1-2-3",
        "٣",
        "1-100000000",
        "99999999999",
    ],
)
def test_integers_refuse(text: str) -> None:
    with pytest.raises(UsageError):
        values.integers()(text)


def test_integers_bounds() -> None:
    assert values.integers(-1)("-1,3") == (-1, 3)
    assert values.integers(-1)("-1-2") == (-1, 0, 1, 2)
    with pytest.raises(UsageError, match="at least 1"):
        values.integers(1)("0")
    with pytest.raises(UsageError, match="at most 512"):
        values.integers(1, 512)("513")


def test_pair_is_one_pair() -> None:
    assert values.pair("512,128") == ((512, 128),)
    for text in ("512", "1,2,3", "a,b", "-1,2", "1-2,3"):
        with pytest.raises(UsageError):
            values.pair(text)


def test_booleans_are_zero_or_one() -> None:
    assert values.booleans("0,1") == (False, True)
    with pytest.raises(UsageError, match="none of 0, 1"):
        values.booleans("yes")


def test_device_sets() -> None:
    assert values.device_sets("RPC0,RPC0/RPC1") == (("RPC0",), ("RPC0", "RPC1"))
    assert values.device_sets(" auto , none ") == (values.AUTO, values.NO_DEVICE)
    assert values.device_sets("local:CPU:1/RPC0,RPC0/local:CPU:1/local:CPU:1") == (
        ("local:CPU:1", "RPC0"),
        ("RPC0", "local:CPU:1", "local:CPU:1"),
    )
    for text in ("", "RPC0,,RPC1", "RPC0/", "auto/RPC0", "none/RPC0", "RPC0/RPC0", "local:CPU:x"):
        with pytest.raises(UsageError):
            values.device_sets(text)


def test_ratios() -> None:
    assert values.ratios("1/1") == ((1.0, 1.0),)
    assert values.ratios("3;1,1/0/2") == ((3.0, 1.0), (1.0, 0.0, 2.0))
    assert values.ratios("0") == ((),)
    assert values.ratios("1/0") == values.ratios("1")
    for text in ("a", "1/-1", "nan", "inf/1", "/1", "/".join("1" * 17)):
        with pytest.raises(UsageError):
            values.ratios(text)


def test_overrides() -> None:
    assert values.overrides("exps=CPU") == ((("exps", "CPU"),),)
    assert values.overrides("a=CPU;b=RPC0[h:1],c=CPU") == (
        (("a", "CPU"), ("b", "RPC0[h:1]")),
        (("c", "CPU"),),
    )
    assert values.overrides(",a=CPU") == ((), (("a", "CPU"),))
    assert values.overrides("") == ((),)
    for text in ("exps", "=CPU", "exps="):
        with pytest.raises(UsageError):
            values.overrides(text)


def test_masks() -> None:
    assert values.masks("0x3,ff") == ("0x3", "ff")
    with pytest.raises(UsageError):
        values.masks("0xg")
