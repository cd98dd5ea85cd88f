"""Where in its model directories a worker looks for a tensor."""

from __future__ import annotations

import os

import numpy as np
import pytest

from caravan.worker.library import Library, find_files
from worker.shelf import Shelf, digest_of

A, B, C = (np.random.default_rng(k).bytes(1000) for k in range(3))


@pytest.fixture
def shelf(tmp_path) -> Shelf:
    return Shelf(tmp_path)


def places(shelf: Shelf, name: str, data: bytes) -> list[tuple[str, int, bool]]:
    return [
        (copy.path.name, copy.offset, copy.known)
        for copy in shelf.library.copies(name, len(data), digest_of(data))
    ]


# files


def test_files_are_found_at_any_depth(tmp_path):
    for name in ("a.gguf", "x/b.gguf", "x/y/c-00001-of-00002.gguf", "x/readme.md", "gguf"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(name)
    found = find_files([str(tmp_path)])
    assert [path.name for path in found] == ["a.gguf", "b.gguf", "c-00001-of-00002.gguf"]


def test_links_are_followed_and_loops_are_not(tmp_path):
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / "0123").write_text("model")
    models = tmp_path / "models"
    (models / "deep").mkdir(parents=True)
    (models / "a.gguf").symlink_to("../blobs/0123")
    (models / "b.gguf").hardlink_to(tmp_path / "blobs" / "0123")
    (models / "deep" / "loop").symlink_to("..")
    (models / "gone.gguf").symlink_to("nowhere")
    (models / "self.gguf").symlink_to("self.gguf")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "c.gguf").touch()
    (models / "linked").symlink_to(tmp_path / "elsewhere")
    assert find_files([str(models)]) == [models / "a.gguf", models / "linked" / "c.gguf"]


def test_only_files_are_files(tmp_path):
    (tmp_path / "folder.gguf").mkdir()
    os.mkfifo(tmp_path / "pipe.gguf")
    assert find_files([str(tmp_path), str(tmp_path / "no")]) == []


def test_directories_inside_of_each_other_are_read_once(tmp_path):
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "a.gguf").touch()
    assert len(find_files([str(tmp_path), str(tmp_path / "x"), str(tmp_path)])) == 1


# where a tensor may be


def test_nothing_is_read_before_the_first_question(shelf):
    shelf.add("a.gguf", t=A)
    assert shelf.opened == []
    places(shelf, "t", A)
    places(shelf, "t", B)
    assert len(shelf.opened) == 1


def test_a_known_digest_leads_there_under_any_name(shelf):
    shelf.add("a.gguf", other=B, t=A).digests["t"] = digest_of(A)
    assert places(shelf, "t", A) == places(shelf, "u", A) == [("a.gguf", 32 + 1000, True)]


def test_what_is_known_to_be_something_else_is_not_tried(shelf):
    shelf.add("a.gguf", t=A).digests["t"] = digest_of(A)
    assert places(shelf, "t", B) == []


def test_without_a_digest_name_and_size_decide_what_is_tried(shelf):
    shelf.add("a.gguf", t=A)
    shelf.add("b.gguf", t=A[:-1])
    shelf.add("c.gguf", u=A)
    assert places(shelf, "t", A) == [("a.gguf", 32, False)]


def test_what_is_known_comes_first(shelf):
    shelf.add("a.gguf", t=A)
    shelf.add("b.gguf", t=A).digests["t"] = digest_of(A)
    assert places(shelf, "t", A) == [("b.gguf", 32, True), ("a.gguf", 32, False)]


def test_what_is_found_is_noted_and_saved(shelf):
    ledger = shelf.add("a.gguf", t=A)
    (copy,) = shelf.library.copies("t", len(A), digest_of(B))
    copy.found(digest_of(A), digest_of(B))
    assert ledger.digests == {"t": digest_of(A)}
    shelf.library.save()
    shelf.library.save()
    assert ledger.saved == 1
    assert places(shelf, "t", A) == [("a.gguf", 32, True)]
    assert places(shelf, "t", B) == []


def test_of_a_new_file_at_least_the_header_is_remembered(shelf):
    ledger = shelf.add("a.gguf", t=A)
    known = shelf.add("b.gguf", u=B)
    known.digests["u"] = digest_of(B)
    places(shelf, "other", C)
    shelf.library.save()
    shelf.library.save()
    assert (ledger.saved, known.saved) == (1, 0)


def test_a_ledger_that_was_wrong_is_put_right(shelf):
    ledger = shelf.add("a.gguf", t=A)
    ledger.digests["t"] = digest_of(B)
    (copy,) = shelf.library.copies("t", len(A), digest_of(B))
    copy.found(digest_of(A), digest_of(B))
    assert ledger.digests == {"t": digest_of(A)}
    assert places(shelf, "t", B) == []


def test_a_file_that_is_found_changed_while_it_is_looked_up(shelf, monkeypatch):
    """By another thread of the session."""
    ledger = shelf.add("m.gguf", t=A)
    ledger.digests["t"] = digest_of(A)
    (copy,) = shelf.library.copies("t", len(A), digest_of(A))

    def digest(name: str) -> bytes | None:
        copy.found(None, digest_of(A))
        return digest_of(A)

    monkeypatch.setattr(ledger, "digest", digest)
    for found in shelf.library.copies("t", len(A), digest_of(A)):
        assert found.offset == copy.offset


@pytest.mark.parametrize("found", [None, digest_of(A), digest_of(B)])
def test_a_file_that_has_changed_is_asked_no_more(shelf, found):
    ledger = shelf.add("a.gguf", t=A, u=B)
    (copy,) = shelf.library.copies("t", len(A), digest_of(A))
    ledger.path.write_bytes(b"new")
    copy.found(found, digest_of(A))
    assert ledger.digests == {}
    assert places(shelf, "u", B) == []


def test_what_is_no_model_is_skipped_and_told(shelf, capsys):
    bad = shelf.directory / "bad.gguf"
    bad.write_text("no model")
    shelf.add("good.gguf", t=A)
    assert places(shelf, "t", A) == [("good.gguf", 32, False)]
    assert places(shelf, "t", A) == [("good.gguf", 32, False)]
    told = capsys.readouterr().err
    assert told == f"caravan worker: skipped: {bad} is no GGUF file\n"


def test_an_error_that_names_no_file_is_told_with_the_file(tmp_path):
    def read(path):
        raise OSError("the disk is tired")

    (tmp_path / "bad.gguf").touch()
    told: list[str] = []
    assert not list(Library([str(tmp_path)], read, told.append).copies("t", 1, b""))
    assert told == [f"skipped: {tmp_path / 'bad.gguf'}: the disk is tired"]


def test_the_file_that_was_right_is_tried_first(shelf):
    names = [f"blk.{k}" for k in range(9)]
    shelf.add("a.gguf", **dict.fromkeys(names, B))
    shelf.add("b.gguf", **dict.fromkeys(names, A))
    order = []
    for name in names:
        for copy in shelf.library.copies(name, len(A), digest_of(A)):
            order.append(copy.path.name[0])
            found = digest_of(copy.path.read_bytes()[copy.offset :][: len(A)])
            copy.found(found, digest_of(A))
            if found == digest_of(A):
                break
    assert "".join(order) == "ab" + "b" * 8


def test_a_file_that_is_another_models_is_left_alone(shelf):
    names = [f"blk.{k}" for k in range(9)]
    ledger = shelf.add("a.gguf", **dict.fromkeys(names, B), same=A)
    tried = 0
    for name in names:
        for copy in shelf.library.copies(name, len(A), digest_of(A)):
            copy.found(digest_of(B), digest_of(A))
            tried += 1
    assert tried == 4
    ledger.digests["same"] = digest_of(A)
    assert places(shelf, "same", A) == [("a.gguf", 32 + 9000, True)]
