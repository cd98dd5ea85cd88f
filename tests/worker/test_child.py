"""Processes that are started find nothing in the directory that they are started in."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from caravan import child
from caravan.worker.local import Worker


@pytest.mark.skipif(sys.version_info < (3, 11), reason="this Python cannot be told")
def test_a_worker_runs_nothing_of_the_directory_that_it_is_started_in(tmp_path, monkeypatch):
    """Somebody's models, with a file that is called like one of Python's own."""
    (tmp_path / "argparse.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    monkeypatch.chdir(tmp_path)
    with Worker("CPU:1") as worker:
        assert worker.endpoint
    assert not (tmp_path / "ran").exists()


def test_the_package_is_found_where_it_is_run_from(monkeypatch):
    monkeypatch.chdir(child._HERE)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    command = [sys.executable, "-S", "-c", "import caravan.errors"]
    subprocess.run(command, env=child.environment(), check=True)
    monkeypatch.setenv("SOMETHING", "x")
    assert "SOMETHING" not in child.environment(("SOMETHING",))
    assert os.environ["SOMETHING"] == "x"
