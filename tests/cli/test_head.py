"""What the options of commands that load a model come to."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from caravan.cli.head import Opened
from caravan.llm import ModelParams
from caravan.plan.auto import AutoSplit, EvenSplit
from caravan.plan.job import Job


def opened(count: int, split: str, shares: tuple[float, ...] = ()) -> Opened:
    devices: list[Any] = [SimpleNamespace(name=f"RPC{number}") for number in range(count)]
    params = ModelParams(tensor_split=shares)
    return Opened(Path("m.gguf"), devices, params, True, None, None, False, split, print)


@pytest.mark.parametrize(("split", "kind"), [("auto", AutoSplit), ("even", EvenSplit)])
def test_there_is_somebody_who_splits_only_where_there_is_something_to_decide(split, kind):
    assert isinstance(opened(2, split).splitter(Job()), kind)
    assert opened(1, split).splitter(Job()) is None
    assert opened(0, split).splitter(Job()) is None
    assert opened(2, split, (3.0, 1.0)).splitter(Job()) is None
    assert opened(2, "memory").splitter(Job()) is None
