"""The documentation says what the code does: numbers, layouts, options, and every example."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest

import caravan
from caravan.cli.main import COMMANDS, cli
from caravan.trace.recorder import _COUNTS_AS
from caravan.trace.spans import LIMIT, Kind
from caravan.wire import codec, extension
from caravan.wire.commands import EXT, LOAD_ENTRY, SET_ENTRY, Base, Command, Ext, base_table
from caravan.wire.layout import Layout
from caravan.wire.records import EXT_TENSOR, SPAN

DOCS = Path(__file__).parent.parent / "docs"
CODES = {"B": ("u8", 1), "H": ("u16", 2), "I": ("u32", 4), "Q": ("u64", 8)}


def text(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


def section(page: str, title: str) -> str:
    """From the heading to the next one of the same level."""
    found = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", page, re.M | re.S)
    assert found, title
    return found[1]


def rows(part: str) -> list[list[str]]:
    """The cells of all tables, headings included."""
    lines = [line.strip("|").split("|") for line in part.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in cells] for cells in lines if not cells[0].startswith("--")]


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page, re.M | re.S)


def spelled(layout: Layout) -> str:
    """`0 handle u64, 8 value u8`"""
    offset, parts = 0, []
    for name, code in layout.fields:
        kind, size = CODES.get(code) or (f"u8[{code[:-1]}]", int(code[:-1]))
        parts.append(f"{offset} {name} {kind}")
        offset += size
    return ", ".join(parts)


# protocol.md

PROTOCOL = text("protocol.md")


def cell(layout: Layout | None, tail: bool, told: str) -> bool:
    """Whether a cell of the commands' table says what the layout is."""
    if layout is None:
        return told == "silent"
    fixed = spelled(layout)
    if not tail:
        return told == (f"`{fixed}`" if fixed else "empty")
    return told.startswith(f"`{fixed}` + ") if fixed else "`" not in told and told != "empty"


def test_every_command_is_told_with_its_number_and_layout():
    told = [row for row in rows(section(PROTOCOL, "Commands")) if row[0].isdigit()]
    assert [(int(row[0]), row[1]) for row in told] == [(e.value, f"`{e.name}`") for e in Ext]
    for number, _, request, reply in told:
        command = EXT[int(number)]
        assert cell(command.request, command.tail, request), command.name
        assert cell(command.reply, command.reply_tail, reply), command.name
    assert f"`{spelled(SET_ENTRY)}`" in section(PROTOCOL, "Commands")
    assert f"`{spelled(LOAD_ENTRY)}`" in " ".join(section(PROTOCOL, "Weights").split())
    assert f"entries of {LOAD_ENTRY.size} bytes, {extension.MAX_LOAD} at most" in PROTOCOL


def test_every_command_has_its_paragraph():
    part = section(PROTOCOL, "Commands").partition("- **")[1:]
    for command in Ext:
        # SESSION has a section
        assert command is Ext.SESSION or re.search(rf"\*\*{command.name}\*\*", "".join(part))


def test_every_status_is_told():
    told = [row for row in rows(section(PROTOCOL, "Statuses")) if row[0].isdigit()]
    assert [(int(row[0]), row[1]) for row in told] == [
        (status.value, f"`{status.name}`") for status in extension.Status
    ]


def test_every_source_is_told():
    told = [row for row in rows(section(PROTOCOL, "Weights")) if row[0].isdigit()]
    assert [(int(row[0]), row[1]) for row in told] == [
        (source.value, f"`{source.name}`") for source in extension.Source
    ]
    assert all(f"`{word}`" in PROTOCOL for word in extension.SOURCES)


def test_the_frame_is_told():
    told = [row for row in rows(section(PROTOCOL, "Frame")) if row[0].isdigit()]
    assert ", ".join(f"{row[0]} {row[2]} {row[1]}" for row in told) == spelled(extension.FRAME)


def test_the_tensor_row_is_told():
    told = [row for row in rows(section(PROTOCOL, "Tensor rows")) if row[0].isdigit()]
    fields = EXT_TENSOR.fields
    assert fields is not None
    expected = [(fields[n][1], fields[n][0].itemsize, f"`{n}`") for n in EXT_TENSOR.names or ()]
    assert [(int(row[0]), int(row[1]), row[2]) for row in told] == expected
    for row in told:
        dtype = fields[row[2].strip("`")][0]
        count = f"[{dtype.shape[0]}]" if dtype.shape else ""
        kind = {"i": "i", "u": "u", "S": "text"}[dtype.base.kind]
        assert row[3] == (kind if kind == "text" else f"{kind}{dtype.base.itemsize * 8}{count}")
    assert f"rows of {EXT_TENSOR.itemsize} bytes" in PROTOCOL


def test_spans_are_told():
    part = section(PROTOCOL, "Timelines")
    fields = SPAN.fields
    assert fields is not None
    found = [row for row in rows(part) if row[0].isdigit()]
    told = [row for row in found if len(row) == 5]
    expected = [(fields[n][1], fields[n][0].itemsize, f"`{n}`") for n in SPAN.names or ()]
    assert [(int(row[0]), int(row[1]), row[2]) for row in told] == expected
    kinds = [row for row in found if len(row) == 4]
    assert [(int(row[0]), row[1]) for row in kinds] == [(k.value, f"`{k.name}`") for k in Kind]
    for number, _, _, use in kinds:
        assert use == ("computing", "waiting", "sending", "")[_COUNTS_AS[int(number)]]
    assert f"{LIMIT:,} spans" in part


def test_limits_are_told():
    found = rows(section(PROTOCOL, "Limits"))[1:]
    assert found
    for name, value, _ in found:
        module, _, constant = name.strip("`").partition(".")
        assert getattr(importlib.import_module(f"caravan.wire.{module}"), constant) == int(value)


def test_the_hello_is_the_one_that_is_sent():
    (shown,) = blocks(PROTOCOL, "hex")
    assert bytes.fromhex(shown) == codec.hello_request(extension.caps())


def test_the_examples_of_json_are_sound():
    decoders = {
        "Who may come in": (extension.decode_tls_request,),
        "SESSION": (extension.decode_session_request, extension.decode_session_reply),
        "Direct copies": (extension.decode_peer_target, extension.decode_peer_request),
    }
    for title, pair in decoders.items():
        shown = blocks(section(PROTOCOL, title), "json")
        for decode, example in zip(pair, shown, strict=True):
            message = decode(example.encode())
            assert json.loads(extension.encode_json(message)) == json.loads(example)


def test_what_differs_between_7_and_8_is_told():
    told = {row[0]: row[1:] for row in rows(section(PROTOCOL, "The base protocol"))}
    for number in (Base.GRAPH_COMPUTE, Base.GRAPH_RECOMPUTE):
        for major, shown in zip((7, 8), told[f"{number.name} ({number})"], strict=True):
            command = base_table(major)[number]
            assert f"`{spelled(command.request)}`" in shown
    changed = [n for n in base_table(8) if not alike(base_table(7).get(n), base_table(8)[n])]
    for number in changed:
        assert f"{Base(number).name} ({number})" in PROTOCOL


def alike(one: Command | None, two: Command) -> bool:
    return one is not None and one.request.fields == two.request.fields


# architecture.md


def test_bounds_are_told():
    found = rows(section(text("architecture.md"), "Bounds"))[1:]
    more = rows(section(text("security.md"), "Strangers and floods"))[1:]
    served = rows(section(text("security.md"), "The HTTP server"))[1:]
    assert found and more and served
    for name, value, _ in [*found, *more, *served]:
        module, _, constant = name.strip("`").rpartition(".")
        number, unit = re.fullmatch(r"([\d.]+) ?(KiB|MiB|s|)", value).groups()
        factor = {"KiB": 1 << 10, "MiB": 1 << 20}.get(unit, 1)
        found_value = getattr(importlib.import_module(f"caravan.{module}"), constant)
        assert found_value == float(number) * factor, name


def test_the_floors_are_those_that_the_test_of_imports_knows():
    from test_architecture import FLOORS

    told = [row[0].strip("`/") for row in rows(section(text("architecture.md"), "The floors"))[1:]]
    assert [name.removesuffix(".py") for name in told] == [*reversed(FLOORS)]


def test_every_path_that_is_named_exists():
    source = Path(caravan.__file__).parent
    for page in DOCS.glob("*.md"):
        for name in re.findall(r"`((?:\w+/)+\w+\.py)`", page.read_text(encoding="utf-8")):
            assert (source / name).is_file() or (DOCS.parent / name).is_file(), (page.name, name)
        for target in re.findall(r"\]\((\w+\.md)", page.read_text(encoding="utf-8")):
            assert (DOCS / target).is_file(), (page.name, target)


# cli.md


GROUPS = ("cache", "model", "tls", "token")
SUBCOMMANDS = [
    f"{group} {name}"
    for group in GROUPS
    for name in cli.get_command(click.Context(cli), group).commands
]


def options(command: click.Command) -> set[str]:
    params = command.get_params(click.Context(command, help_option_names=["-h", "--help"]))
    visible = [p for p in params if isinstance(p, click.Option) and not p.hidden]
    return {name for param in visible for name in (*param.opts, *param.secondary_opts)}


def told_options(part: str) -> set[str]:
    return set(re.findall(r"`(--?[a-z][-\w]*)`", part, re.I))


@pytest.mark.parametrize("words", ["", *COMMANDS, *SUBCOMMANDS])
def test_every_option_has_a_help_text(words):
    command: click.Command = cli
    for word in words.split():
        assert isinstance(command, click.Group)
        found = command.get_command(click.Context(command), word)
        assert found is not None
        command = found
    params = [param for param in command.params if isinstance(param, click.Option)]
    silent = [param.opts for param in params if not param.hidden and not param.help]
    assert silent == []


@pytest.mark.parametrize("words", SUBCOMMANDS)
def test_every_command_of_a_group_is_listed_with_a_whole_sentence(words):
    group, name = words.split()
    found = cli.get_command(click.Context(cli), group)
    assert isinstance(found, click.Group)
    # what is left of 80 columns, beside the longest name
    assert not found.commands[name].get_short_help_str(66).endswith("...")


@pytest.mark.parametrize("name", ["", *(name for name in COMMANDS if name not in GROUPS)])
def test_every_option_is_told_and_exists(name):
    command = cli.get_command(click.Context(cli), name) if name else cli
    part = section(text("cli.md"), f"caravan {name}".strip())
    assert told_options(part) == options(command)


@pytest.mark.parametrize("group", GROUPS)
def test_every_command_of_a_group_is_told(group):
    command = cli.get_command(click.Context(cli), group)
    assert isinstance(command, click.Group)
    found = rows(section(text("cli.md"), f"caravan {group}"))[1:]
    assert {row[0].strip("`").split()[0] for row in found} == set(command.commands)
    for row in found:
        subcommand = command.commands[row[0].strip("`").split()[0]]
        assert told_options(row[1]) == options(subcommand) - {"-h", "--help"}


def test_every_environment_variable_is_told():
    source = Path(caravan.__file__).parent
    read = {
        name
        for path in source.rglob("*.py")
        for name in re.findall(r'"(CARAVAN_[A-Z_]+|LLAMA_[A-Z_]+)"', path.read_text("utf-8"))
    }
    found = rows(section(text("cli.md"), "Environment"))[1:]
    assert {row[0].strip("`") for row in found} == read


# python.md


@pytest.fixture(scope="module")
def endpoints() -> Iterator[list[str]]:
    with caravan.LocalWorkers(2) as workers:
        yield workers.endpoints


def test_the_examples_run(endpoints, smollm2, tmp_path, monkeypatch):
    """In order, in one namespace; what they print is what the page shows."""
    replaced = {
        '"lab1:50052"': repr(endpoints[0]),
        '"lab2:50052"': repr(endpoints[1]),
        '"smollm2"': repr(str(smollm2)),
    }
    found = re.findall(
        r"^```python\n(.*?)^```$(?:\n*^```text\n(.*?)^```$)?", text("python.md"), re.M | re.S
    )
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        stack.callback(close_all, namespace)
        for number, (source, shown) in enumerate(found, 1):
            for name, value in replaced.items():
                source = source.replace(name, value)
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(compile(source, f"python.md, block {number}", "exec"), namespace)
            assert printed.getvalue() == shown, f"block {number}"


def test_the_example_of_the_readme_runs_and_ends_its_line(endpoints, smollm2, capsys):
    (source,) = blocks((DOCS.parent / "README.md").read_text(encoding="utf-8"), "python")
    for number, endpoint in enumerate(endpoints, 1):
        source = source.replace(f'"lab{number}:50052"', repr(endpoint))
    exec(compile(source.replace('"model.gguf"', repr(str(smollm2))), "README.md", "exec"), {})
    out = capsys.readouterr().out
    assert out.strip()
    assert out.endswith("\n")


def close_all(namespace: dict[str, Any]) -> None:
    """What an example that failed left open."""
    for name in ("context", "model", "cluster"):
        if name in namespace:
            namespace[name].close()
