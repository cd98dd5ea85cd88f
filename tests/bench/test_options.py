"""The option table and the grid made from it."""

from __future__ import annotations

import dataclasses

import pytest

from bench.fakes import CORES, grid_of
from caravan.bench.options import BY_FIELD, OPTIONS, defaults, read_grid, shown_columns
from caravan.bench.plan import Case
from caravan.errors import UsageError


def test_every_field_of_a_case_has_an_option() -> None:
    assert {field.name for field in dataclasses.fields(Case)} | {"n_pg"} == set(BY_FIELD)


def test_names_are_unique() -> None:
    flags = [flag for option in OPTIONS for flag in option.flags]
    assert len(flags) == len(set(flags))


def test_nothing_given_is_the_defaults() -> None:
    grid = read_grid({}, CORES)
    assert grid == defaults(CORES)
    assert grid["n_threads"] == (CORES,)
    assert shown_columns(grid, CORES) == set()


def test_repeats_add_up() -> None:
    assert read_grid({"n_prompt": ["1,2", "8"]}, CORES)["n_prompt"] == (1, 2, 8)


def test_main_gpu_replaces() -> None:
    assert read_grid({"main_gpu": ["0,1", "2"]}, CORES)["main_gpu"] == (2,)


def test_flash_attn_words() -> None:
    assert grid_of(flash_attn="on,0,auto,1,off")["flash_attn"] == (1, 0, -1, 1, 0)


@pytest.mark.parametrize(
    ("field", "text", "flag"),
    [
        ("split_mode", "row", "--split-mode"),
        ("split_mode", "layer,tensor", "--split-mode"),
        ("cpu_strict", "1", "--cpu-strict"),
        ("fit_target", "1024", "--fit-target"),
        ("fit_min_ctx", "4096", "--fit-ctx"),
        ("cpu_mask", "0x1,0x2", "--cpu-mask"),
    ],
)
def test_what_does_not_work_says_so(field: str, text: str, flag: str) -> None:
    with pytest.raises(UsageError, match=f"{flag}.* not supported yet"):
        grid_of(**{field: text})


@pytest.mark.parametrize(
    ("field", "text"),
    [("cpu_strict", "0"), ("fit_target", "0"), ("split_mode", "none,layer")],
)
def test_their_defaults_are_accepted(field: str, text: str) -> None:
    assert grid_of(**{field: text})[field] == BY_FIELD[field].reader(text)


def test_an_error_names_the_option() -> None:
    with pytest.raises(UsageError, match=r"^--ubatch-size: 'x'"):
        grid_of(n_ubatch="x")


def test_shown_columns_are_those_that_differ() -> None:
    grid = grid_of(n_batch="2048", n_ubatch="64,128", tensor_split="1/1", n_threads=str(CORES))
    assert shown_columns(grid, CORES) == {"n_ubatch", "tensor_split"}
