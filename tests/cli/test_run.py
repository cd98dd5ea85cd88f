"""`caravan run`: what can be refused is refused before anything is started."""

from __future__ import annotations

import pytest

from caravan.cli import main as cli_main


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["-p", "x", "--rpc", "a:1", "--local-workers", "2"], "do not go together"),
        (["-p", "x", "-ts", "1/b"], "--tensor-split"),
        ([], "-p or -f"),
        (["-p", "x", "-fa", "maybe"], "flash-attn"),
    ],
)
def test_wrong_usage(args, words, smollm2, capsys):
    assert cli_main.main(["run", "-m", str(smollm2), *args]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert words in err


def test_local_workers_come_before_endpoints_of_the_environment(smollm2, capsys, monkeypatch):
    monkeypatch.setenv("CARAVAN_RPC", "nowhere.invalid:1")
    args = ["-m", str(smollm2), "-p", "One two three", "-n", "2", "--temp", "0"]
    assert cli_main.main(["run", *args, "--local-workers", "1"]) == 0
    out, err = capsys.readouterr()
    assert out.strip()
    assert "prompt: 3 tokens" in err or "prompt: 4 tokens" in err
    assert "RPC0 (127.0.0.1:" in err
