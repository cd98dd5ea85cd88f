"""`caravan demo`: the experiment itself, and what its exit code says."""

from __future__ import annotations

import json

import pytest

from caravan.bench import demo as demo_room
from caravan.bench.demo import DemoResult
from caravan.cli import main as cli_main

KEYS = {"pp_1", "pp_2", "speedup", "text", "text_local", "identical"}


def test_the_demo_as_json(smollm2, monkeypatch, capsys):
    monkeypatch.setattr(demo_room, "PROMPT_TOKENS", 96)
    monkeypatch.setattr(demo_room, "ROUNDS", 1)
    monkeypatch.setattr(demo_room, "ANSWER_TOKENS", 8)
    assert cli_main.main(["demo", "--json"]) == 0
    out, err = capsys.readouterr()
    result = json.loads(out)
    assert set(result) == KEYS
    assert result["identical"] is True
    assert result["text"] == result["text_local"] != ""
    assert result["pp_1"] > 0 < result["pp_2"]
    assert "starting two workers" in err


@pytest.mark.parametrize("same", [True, False])
def test_another_text_is_a_failure(same, smollm2, monkeypatch, capsys):
    made = DemoResult(1.0, 1.8, 1.8, "yes", "yes" if same else "no", same)
    monkeypatch.setattr(demo_room, "demo", lambda path, say, timeout: made)
    assert cli_main.main(["demo"]) == (0 if same else 1)
    assert ("alone: yes" if same else "alone: NO: 'no'") in capsys.readouterr().out
