"""The floors: imports go down only, and some rooms may not see some things at all."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import caravan.errors

ROOT = Path(caravan.errors.__file__).parent
# from the ground up; a floor may import itself and what stands before it
FLOORS = (
    "errors",
    "child",
    "models",
    "interrupt",
    "trace",
    "engine",
    "wire",
    "transport",
    "trust",
    "stream",
    "worker",
    "backend",
    "llm",
    "batching",
    "plan",
    "bench",
    "serve",
    "cli",
)
# command lines start worker processes and wait for them; the head's floors never do
TOP = ("__init__", "__main__")


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Line and full name of everything imported, in functions and for type checkers too."""
    package = module_name(path).split(".")
    if path.name != "__init__.py":
        package = package[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)


def floor(name: str) -> str | None:
    """The floor of a full name in this package; None for the package itself and others."""
    parts = name.split(".")
    return parts[1] if parts[0] == "caravan" and len(parts) > 1 and parts[1] in FLOORS else None


def files(*rooms: str) -> list[Path]:
    found = [path for room in rooms for path in sorted((ROOT / room).rglob("*.py"))]
    assert found
    return found


def test_every_room_has_a_floor():
    for path in ROOT.iterdir():
        if path.suffix == ".py" or (path.is_dir() and any(path.glob("*.py"))):
            assert path.stem in (*FLOORS, *TOP), f"{path.name} stands on no floor"


def test_imports_go_down_only():
    wrong = []
    for path in sorted(ROOT.rglob("*.py")):
        own = floor(module_name(path))
        if own is None:
            continue
        for line, name in imports(path):
            other = floor(name)
            if other is not None and FLOORS.index(other) > FLOORS.index(own):
                wrong.append(f"{path.relative_to(ROOT)}:{line} ({own}) imports {name} ({other})")
    assert not wrong, "\n".join(wrong)


def seen(room: str, names: tuple[str, ...]) -> list[str]:
    return [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in files(room)
        for line, name in imports(path)
        if any(name == banned or name.startswith(f"{banned}.") for banned in names)
    ]


@pytest.mark.parametrize(
    ("room", "banned"),
    [
        ("wire", ("socket", "threading", "ctypes", "select", "asyncio", "multiprocessing")),
        ("wire", ("caravan.engine",)),
        ("transport", ("ctypes", "caravan.engine", "caravan.wire")),
        ("stream", ("caravan.engine.llama", "caravan.llm", "caravan.worker", "ctypes")),
        ("worker", ("caravan.engine.llama", "caravan.llm", "caravan.stream", "caravan.backend")),
        ("backend", ("caravan.worker", "caravan.llm")),
    ],
)
def test_rooms_do_not_see_what_is_not_theirs(room, banned):
    wrong = seen(room, banned)
    assert not wrong, "\n".join(wrong)


def test_every_module_says_what_it_owns():
    silent = [
        str(path.relative_to(ROOT))
        for path in sorted(ROOT.rglob("*.py"))
        if path.stat().st_size and not ast.get_docstring(ast.parse(path.read_text("utf-8")))
    ]
    assert not silent


def test_the_check_sees_relative_late_and_typing_imports(tmp_path, monkeypatch):
    room = tmp_path / "caravan" / "wire"
    room.mkdir(parents=True)
    file = room / "bad.py"
    file.write_text(
        "from ..stream import link\n"
        "from . import codec\n"
        "def late():\n    import caravan.llm.model\n"
        "if TYPE_CHECKING:\n    from caravan import backend\n"
    )
    monkeypatch.setattr(f"{__name__}.ROOT", tmp_path / "caravan")
    assert sorted(imports(file)) == [
        (1, "caravan.stream.link"),
        (2, "caravan.wire.codec"),
        (4, "caravan.llm.model"),
        (6, "caravan.backend"),
    ]
    with pytest.raises(AssertionError, match=r"imports caravan\.stream\.link"):
        test_imports_go_down_only()
