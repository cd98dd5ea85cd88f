"""Each printer, read back by the reader that its format is for."""

from __future__ import annotations

import csv
import io
import json
import sqlite3
from collections.abc import Sequence
from dataclasses import replace

import pytest

from bench.fakes import HOST, result_of
from caravan.bench.output import make_printer
from caravan.bench.result import FIELDS, Result

NASTY = 'it\'s "a\\b", caf\u00e9\n\u2603; DROP TABLE llama_bench;--.gguf'
RESULTS = (result_of([1000, 3000]), result_of(model=NASTY, n_prompt=0, n_gen=3, repack=False))


def printed(name: str, results: Sequence[Result] = RESULTS, *, whole: bool = True) -> str:
    out = io.StringIO()
    printer = make_printer(name, out, HOST, set())
    assert printer is not None
    printer.header()
    for result in results:
        printer.result(result)
    if whole:
        printer.footer()
    else:
        printer.abandon()
    return out.getvalue()


def test_none_prints_nothing() -> None:
    assert make_printer("none", io.StringIO(), HOST, set()) is None


def test_csv() -> None:
    text = printed("csv")
    assert text.startswith("build_commit,build_number,cpu_info,")
    assert '\n"caravan 0.1.0, ggml 0.26.0","3","Some CPU","",' in text
    rows = list(csv.DictReader(io.StringIO(text, newline="")))
    assert len(rows) == 2
    assert rows[1]["model_filename"] == NASTY
    assert list(rows[0]) == [field.name for field in FIELDS]


def test_json() -> None:
    text = printed("json")
    assert text.startswith('[\n  {\n    "build_commit": "caravan 0.1.0, ggml 0.26.0",\n')
    assert text.endswith(" ]\n  }\n]\n")
    first, second = json.loads(text)
    assert first["samples_ns"] == [1000, 3000]
    assert first["samples_ts"] == [8e6, pytest.approx(8e6 / 3, rel=1e-5)]
    assert (first["repack"], second["repack"], first["no_op_offload"]) == (True, False, 0)
    assert second["model_filename"] == NASTY
    assert '    "samples_ns": [ 1000, 3000 ],\n' in text
    assert list(first) == [*(field.name for field in FIELDS), "samples_ns", "samples_ts"]


def test_json_of_no_test_and_of_a_run_cut_short_is_still_json() -> None:
    assert json.loads(printed("json", [])) == []
    assert len(json.loads(printed("json", RESULTS[:1], whole=False))) == 1


def test_jsonl() -> None:
    lines = printed("jsonl").splitlines()
    assert [json.loads(line)["n_gen"] for line in lines] == [0, 3]
    assert json.loads(lines[1])["model_filename"] == NASTY


def test_sql_runs_and_keeps_every_value() -> None:
    base = sqlite3.connect(":memory:")
    base.executescript(printed("sql"))
    base.executescript(printed("sql"))  # a second run adds to the table
    rows = base.execute("SELECT model_filename, n_gen, repack, typeof(avg_ts) FROM llama_bench")
    assert rows.fetchall() == [("m.gguf", 0, 1, "real"), (NASTY, 3, 0, "real")] * 2
    base.close()


def test_threads_of_workers_that_nobody_here_started_are_not_known() -> None:
    (row,) = json.loads(printed("json", RESULTS[:1]))
    assert (row["local_workers"], row["worker_threads"]) == (0, None)
    assert (row["direct_copies"], row["wire_dtype"]) == (True, "f32")
    (record,) = csv.DictReader(io.StringIO(printed("csv", RESULTS[:1]), newline=""))
    assert record["worker_threads"] == ""
    base = sqlite3.connect(":memory:")
    base.executescript(printed("sql", RESULTS[:1]))
    assert base.execute("SELECT typeof(worker_threads) FROM llama_bench").fetchall() == [("null",)]
    base.close()
    host = replace(HOST, local_workers=2, worker_threads=3, direct_copies=False, wire_dtype="f16")
    (row,) = json.loads(printed("json", [result_of(host=host)]))
    assert (row["worker_threads"], row["direct_copies"], row["wire_dtype"]) == (3, False, "f16")


def test_sql_shape() -> None:
    text = printed("sql")
    assert text.startswith(
        "CREATE TABLE IF NOT EXISTS llama_bench (\n"
        "  build_commit TEXT,\n  build_number INTEGER,\n  cpu_info TEXT,\n"
    )
    assert "  cpu_strict INTEGER,\n" in text
    assert "\n);\n\nINSERT INTO llama_bench (build_commit, build_number, " in text
    assert " VALUES ('caravan 0.1.0, ggml 0.26.0', '3', " in text


def test_texts_that_are_no_unicode_survive() -> None:
    out = io.TextIOWrapper(io.BytesIO(), "utf-8", errors="backslashreplace")
    printer = make_printer("jsonl", out, replace(HOST, cpu_info="\udcff"), set())
    assert printer is not None
    printer.result(result_of(host=replace(HOST, cpu_info="\udcff")))
