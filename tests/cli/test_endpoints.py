"""Which workers are meant: the option, the two variables, and what stands in nobody's way."""

from __future__ import annotations

import pytest

from caravan.cli.endpoints import endpoints
from caravan.errors import UsageError


@pytest.fixture(autouse=True)
def variables(monkeypatch):
    monkeypatch.setenv("CARAVAN_RPC", "a")
    monkeypatch.setenv("LLAMA_ARG_RPC", "b:2")
    return monkeypatch


def test_options_come_before_variables():
    assert endpoints(["c:3,d", "[::1]:5"], 0) == ("c:3", "d:50052", "[::1]:5")
    assert endpoints([], 0) == ("a:50052",)


@pytest.mark.parametrize("blank", ["", " ", "\t\n"])
def test_a_blank_variable_is_not_set(variables, blank):
    variables.setenv("CARAVAN_RPC", blank)
    assert endpoints([], 0) == ("b:2",)
    variables.setenv("LLAMA_ARG_RPC", blank)
    assert endpoints([], 0) == ()


def test_a_variable_without_an_endpoint_is_refused(variables):
    variables.setenv("CARAVAN_RPC", ",")
    with pytest.raises(UsageError, match="no endpoint"):
        endpoints([], 0)


@pytest.mark.parametrize("given", [[""], [" "], [","], ["a:1", ""]])
def test_an_empty_option_is_refused(given):
    with pytest.raises(UsageError, match="no endpoint"):
        endpoints(given, 0)


def test_local_workers_exclude_the_option_and_outdo_the_variables():
    assert endpoints([], 2) == ()
    with pytest.raises(UsageError, match="exclude each other"):
        endpoints(["a:1"], 2)
