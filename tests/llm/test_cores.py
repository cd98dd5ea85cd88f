"""How many threads: physical cores, as far as Linux tells."""

from __future__ import annotations

import os

import pytest

from caravan.llm import physical_cores


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Makes a machine of the given sibling lists, one a CPU."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(256), raising=False)

    def make(*siblings: str, big: str = "") -> object:
        for number, text in enumerate(siblings):
            folder = tmp_path / f"system/cpu/cpu{number}/topology"
            folder.mkdir(parents=True)
            (folder / "thread_siblings").write_text(f"{text}\n")
        if big:
            (tmp_path / "cpu_core").mkdir()
            (tmp_path / "cpu_core/cpus").write_text(f"{big}\n")
        return tmp_path

    return make


def test_siblings_count_once(machine):
    assert physical_cores(machine("3", "3", "c", "c")) == 2


def test_small_cores_of_a_hybrid_do_not_count(machine):
    assert physical_cores(machine("3", "3", "4", "8", big="0-1")) == 1


def test_unreadable_list_of_big_cores_is_ignored(machine):
    assert physical_cores(machine("1", "2", big="nonsense")) == 2


def test_never_more_than_this_process_may_use(machine, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0}, raising=False)
    assert physical_cores(machine("1", "2", "4")) == 1


@pytest.mark.parametrize(("logical", "cores"), [(None, 1), (1, 1), (4, 4), (16, 8)])
def test_guess_where_the_system_does_not_say(machine, monkeypatch, logical, cores):
    monkeypatch.setattr(os, "cpu_count", lambda: logical)
    assert physical_cores(machine()) == cores


def test_this_machine_has_one():
    assert 1 <= physical_cores() <= (os.cpu_count() or 1)
