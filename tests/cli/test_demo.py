"""`caravan demo`: the experiment itself, and what its exit code says."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from caravan.bench import demo as demo_room
from caravan.bench.demo import DemoResult
from caravan.cli import main as cli_main
from caravan.cli.demo import _told

KEYS = {"pp_1", "pp_2", "speedup", "speedups", "text", "text_local", "identical"}


def test_the_demo_as_json(smollm2, monkeypatch, capsys):
    monkeypatch.setattr(demo_room, "PROMPT_TOKENS", 96)
    monkeypatch.setattr(demo_room, "ROUNDS", 2)
    monkeypatch.setattr(demo_room, "ANSWER_TOKENS", 8)
    assert cli_main.main(["demo", "--json"]) == 0
    out, err = capsys.readouterr()
    result = json.loads(out)
    assert set(result) == KEYS
    assert result["identical"] is True
    assert result["text"] == result["text_local"] != ""
    assert result["pp_1"] > 0 < result["pp_2"]
    assert len(result["speedups"]) == 2
    assert min(result["speedups"]) > 0
    assert "starting two workers" in err


@pytest.mark.parametrize("same", [True, False])
def test_another_text_is_a_failure(same, smollm2, monkeypatch, capsys):
    made = DemoResult(1.0, 1.8, 1.8, (1.8,), "yes", "yes" if same else "no", same)
    monkeypatch.setattr(demo_room, "demo", lambda path, say, timeout: made)
    assert cli_main.main(["demo"]) == (0 if same else 1)
    assert ("alone: yes" if same else "alone: NO: 'no'") in capsys.readouterr().out


def told(**changes):
    made = DemoResult(100.0, 180.0, 1.8, (1.85, 1.7, 1.8), "yes", "yes", True)
    return _told(replace(made, **changes))


def test_the_speed_up_is_told_with_its_spread():
    assert "\nspeed-up                     1.80 (1.70 to 1.85)\n" in told()
    assert "\nspeed-up                     1.80\n" in told(speedups=(1.8,))


def test_the_answer_is_wrapped_and_keeps_its_own_lines():
    words = "caravan " * 30
    text = told(text=f"{words}\n\n- {words}", text_local=words, identical=False)
    lines = text.splitlines()
    assert max(map(len, lines)) <= 80
    assert sum(line.startswith("- caravan") for line in lines) == 1
    assert text.count("caravan") == 3 * 30
