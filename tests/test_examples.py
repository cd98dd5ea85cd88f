"""The programs in examples/ run, with workers of their own, and say what they should."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent / "examples"


def run(name: str, *arguments: str, code: int = 0) -> str:
    command = [sys.executable, str(FOLDER / f"{name}.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == code, done.stderr
    assert code or done.stderr == ""
    return done.stdout if not code else done.stderr


def test_stream(smollm2):
    out = run("stream", "--model", str(smollm2), "--tokens", "8")
    lines = out.splitlines()
    assert lines[0].startswith("The capital of France is Paris.")
    assert re.fullmatch(r"local:CPU:1: \d+ layers", lines[-3])
    assert re.fullmatch(r"local:CPU:1#2: \d+ layers", lines[-2])
    assert re.fullmatch(r"\d+ tokens/s read, \d+ written", lines[-1])


def test_chat(smollm2):
    lines = run("chat", "--model", str(smollm2), "--tokens", "12").splitlines()
    assert lines[:2] == ["> What is the capital of France?", "The capital of France is Paris."]
    assert lines[3:5] == ["> And of Italy?", "The capital of Italy is Rome."]
    assert lines[5] == "  (15 tokens read, 7 written)"


def test_several(smollm2):
    lines = run("several", "--model", str(smollm2), "--tokens", "4").splitlines()
    assert sorted(line.partition(" ->")[0] for line in lines[:-1]) == [
        "'One, two, three,'",
        "'The capital of France is'",
        "'The opposite of hot is'",
    ]
    assert all("length, 4 tokens" in line for line in lines[:-1])
    assert re.fullmatch(r"12 tokens in \d+ steps", lines[-1])


def test_embeddings(smollm2):
    lines = run("embeddings", "--model", str(smollm2)).splitlines()
    assert lines[0] == "4 vectors of 576 numbers"
    assert lines[1].endswith("A kitten is lying on the couch.")
    assert len(lines) == 4


def test_json_schema(smollm2):
    text, _, last = run("json_schema", "--model", str(smollm2)).rstrip("\n").rpartition("\n")
    found = json.loads(text)
    assert last == f"{found['name']} | {found['born']} | {found['city']}"


def test_resume(smollm2):
    out = run("resume", "--model", str(smollm2), "--tokens", "8")
    assert out.endswith("the same text: True\n")
    assert re.search(r"\[RPC1 at \S+ was lost during .*tokens? replayed\]", out)


def test_keep(smollm2, tmp_path):
    words = ("--model", str(smollm2), "--tokens", "8", "--rpc", "local:CPU:1")
    path = str(tmp_path / "talk")
    run("keep", "save", path, "My name is Ada.", *words)
    out = run("keep", "load", path, "What is my name?", *words)
    assert out.startswith("2 messages, as they were\n")
    found = re.search(r"\((\d+) tokens read\)", out)
    assert found is not None and int(found[1]) < 25
    (tmp_path / "talk").write_bytes(b"x")
    error = run("keep", "load", path, "What is my name?", *words, code=1)
    assert error == f"{path} is no saved conversation\n"


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda path: path.stem)
def test_every_example_is_run_here_and_explains_itself(path):
    assert f"def test_{path.stem}(" in Path(__file__).read_text(encoding="utf-8")
    assert f"python examples/{path.stem}.py" in path.read_text(encoding="utf-8").split('"""')[1]
