"""The printers: md, csv, json, jsonl and sql, each for one stream.

A printer gets `header`, then every result as it comes (`result`), then `footer`; `abandon` instead
of `footer` when the run ended early. What it wrote is flushed after each test. Knows `Result` only.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Set
from typing import Protocol, TextIO

from caravan.bench.result import FIELDS, Field, Host, Kind, Result
from caravan.bench.table import MarkdownPrinter
from caravan.bench.usage import records


class Printer(Protocol):
    """What writes the results of one run to one stream."""

    def header(self) -> None: ...
    def result(self, result: Result) -> None: ...
    def footer(self) -> None: ...
    def abandon(self) -> None: ...


_SQL_TYPES = {
    Kind.TEXT: "TEXT",
    Kind.INTEGER: "INTEGER",
    Kind.BOOLEAN: "INTEGER",
    Kind.REAL: "REAL",
}


class _Printer:
    def __init__(self, out: TextIO) -> None:
        self.out = out

    def header(self) -> None:
        """Nothing comes before the first result unless a format says so."""

    def footer(self) -> None:
        """Nothing comes after the last result unless a format says so."""

    def abandon(self) -> None:
        """Leave what was written in a state that can be read."""
        self.footer()

    def write(self, text: str) -> None:
        self.out.write(text)
        self.out.flush()


class CsvPrinter(_Printer):
    """A bare header line, then every value in double quotes."""

    def header(self) -> None:
        self.write(_names(",") + "\n")

    def result(self, result: Result) -> None:
        self.write(",".join(_csv_quoted(field.text(result)) for field in FIELDS) + "\n")


class JsonPrinter(_Printer):
    """One array, an object per test."""

    _first = True

    def header(self) -> None:
        self.write("[\n")

    def result(self, result: Result) -> None:
        members = ",\n".join(f"    {member}" for member in _json_members(result))
        self.write(("" if self._first else ",\n") + f"  {{\n{members}\n  }}")
        self._first = False

    def footer(self) -> None:
        self.write("]\n" if self._first else "\n]\n")


class JsonLinesPrinter(_Printer):
    """One object per line."""

    def result(self, result: Result) -> None:
        self.write("{" + ", ".join(_json_members(result)) + "}\n")


class SqlPrinter(_Printer):
    """A table, then one INSERT per test; unlike llama-bench's, safe with quotes in values."""

    def header(self) -> None:
        columns = ",\n".join(f"  {field.name} {_SQL_TYPES[field.kind]}" for field in FIELDS)
        self.write(f"CREATE TABLE IF NOT EXISTS llama_bench (\n{columns}\n);\n\n")

    def result(self, result: Result) -> None:
        values = ", ".join(_sql_value(field, result) for field in FIELDS)
        self.write(f"INSERT INTO llama_bench ({_names(', ')}) VALUES ({values});\n")


def _names(separator: str) -> str:
    return separator.join(field.name for field in FIELDS)


def _csv_quoted(text: str) -> str:
    return '"' + text.replace('"', '""') + '"'


def _sql_value(field: Field, result: Result) -> str:
    if field.get(result) is None:
        return "NULL"
    text = field.text(result)
    # SQL knows no escape but the doubled quote; a NUL would end the text for most readers.
    return "'" + text.replace("\0", "").replace("'", "''") + "'"


def _json_members(result: Result) -> Iterable[str]:
    for field in FIELDS:
        yield f'"{field.name}": {_json_value(field, result)}'
    yield f'"samples_ns": [ {", ".join(str(ns) for ns in result.samples_ns)} ]'
    yield f'"samples_ts": [ {", ".join(f"{ts:g}" for ts in result.samples_ts)} ]'
    if result.uses is not None:
        yield f'"utilization": {json.dumps(records(result.uses), ensure_ascii=False)}'


def _json_value(field: Field, result: Result) -> str:
    if field.get(result) is None:
        return "null"
    if field.kind is Kind.TEXT:
        return json.dumps(field.get(result), ensure_ascii=False)
    if field.kind is Kind.BOOLEAN:
        return "true" if field.get(result) else "false"
    return field.text(result)


_PRINTERS: dict[str, Callable[[TextIO], Printer]] = {
    "csv": CsvPrinter,
    "json": JsonPrinter,
    "jsonl": JsonLinesPrinter,
    "sql": SqlPrinter,
}


def make_printer(name: str, out: TextIO, host: Host, shown: Set[str]) -> Printer | None:
    """The printer of a format, or None for `none`. `shown`: the options a table must show."""
    if name == "none":
        return None
    return MarkdownPrinter(out, host, shown) if name == "md" else _PRINTERS[name](out)
