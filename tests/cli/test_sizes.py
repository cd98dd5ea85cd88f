"""Sizes as people write them."""

import click
import pytest

from caravan.cli.sizes import Size, parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("123", 123),
        ("123B", 123),
        ("8GiB", 8 << 30),
        ("8 gib", 8 << 30),
        ("8G", 8 << 30),
        ("8Gi", 8 << 30),
        ("500MB", 500_000_000),
        ("500mb", 500_000_000),
        ("1.5G", 3 << 29),
        (".5K", 512),
        ("2T", 2 << 40),
        ("1TB", 10**12),
        (" 7kB ", 7000),
        ("1152921504606846977", (1 << 60) + 1),
    ],
)
def test_sizes_are_read(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text", ["", "GiB", "8Q", "-1", "1e9", "nan", "inf", "8iB", "8 G B", "1..5G", "0x10", "٣"]
)
def test_what_is_no_size_is_none(text):
    assert parse_size(text) is None


def test_the_option_takes_text_and_numbers():
    assert Size().convert("2KiB", None, None) == 2048
    assert Size().convert(4096, None, None) == 4096


@pytest.mark.parametrize("value", ["0", "none", "2EiB", "9999999T", "9" * 5000])
def test_the_option_refuses_in_one_line(value):
    with pytest.raises(click.BadParameter, match="not a size"):
        Size().convert(value, None, None)


def test_the_least_size_is_told_in_the_singular():
    with pytest.raises(click.BadParameter, match="from 1 byte to 1 EiB"):
        Size().convert("0", None, None)


def test_a_least_size_is_kept():
    with pytest.raises(click.BadParameter, match="from 1024 bytes"):
        Size(least=1024).convert("1000", None, None)
