"""`Saved`: a conversation in a file: what it was read with, its tokens, the engine's state.

Called by `Context` and `Chat`. A file is whole or it is not there; what is in it is checked before
the engine sees any of it.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from caravan import engine
from caravan.errors import StateError
from caravan.models.fingerprint import fingerprint

if TYPE_CHECKING:
    from caravan.llm.model import Model
    from caravan.llm.params import ContextParams

_MAGIC = b"caravan state 1\n"
_DIGEST_SIZE = 32
_MOST_HEADER = 1 << 28
_FORMATS = {"type_k": "K cache", "type_v": "V cache"}


@dataclass(frozen=True, slots=True)
class Saved:
    """See the module.

    Attributes:
        model: what tells the model from others, and what it is called.
        formats: of the context.
        engine: version of the engine that made `state`.
        tokens: all that the context held.
        state: of the engine, for these tokens.
        more: what else was to be kept, as JSON has it.
    """

    model: dict[str, str]
    formats: dict[str, str]
    engine: str
    tokens: list[int]
    state: bytes
    more: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        model: Model,
        params: ContextParams,
        tokens: Sequence[int],
        state: bytes,
        more: dict[str, Any] | None = None,
    ) -> Saved:
        """Raises ModelError when the model's files are not there any more."""
        about = {"fingerprint": fingerprint(model.parts), "description": model.description}
        formats = {name: str(getattr(params, name)) for name in _FORMATS}
        return cls(about, formats, engine.load().version, [*tokens], state, more or {})

    def write(self, path: str | os.PathLike[str]) -> None:
        """Put it into a file, in place of what is there; on an error that stays as it is.

        Raises StateError.
        """
        # where a link shows; and a device must not become a file
        target = Path(os.path.realpath(path))
        if target.exists() and not target.is_file():
            raise StateError(f"cannot write {path}: it is no file")
        header = {
            "model": self.model,
            "formats": self.formats,
            "engine": self.engine,
            "n_tokens": len(self.tokens),
            "state_size": len(self.state),
            "more": self.more,
        }
        text = json.dumps(header, ensure_ascii=False).encode("utf-8", "surrogatepass")
        parts = [_MAGIC, len(text).to_bytes(8, "little"), text, _packed(self.tokens), self.state]
        try:
            _replace(target, [*parts, _digest(parts)])
        except OSError as exc:
            raise StateError(f"cannot write {target}: {exc.strerror or exc}") from exc

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Saved:
        """What is in a file. Raises StateError for one that is not there, is something else, or is
        not what was written."""
        source = Path(path)
        try:
            with open(source, "rb") as file:
                # before all of what may be anything
                data = file.read(len(_MAGIC))
                if data == _MAGIC:
                    data += file.read()
        except OSError as exc:
            raise StateError(f"cannot read {source}: {exc.strerror or exc}") from exc
        if not data.startswith(_MAGIC):
            raise StateError(f"{source} is no saved conversation")
        try:
            return cls._parsed(memoryview(data))
        except (ValueError, KeyError, TypeError, RecursionError) as exc:
            raise StateError(f"{source} is cut off or damaged") from exc

    @staticmethod
    def may_replace(path: str | os.PathLike[str]) -> bool:
        """Whether nothing is lost there but another saved conversation."""
        try:
            with open(path, "rb") as file:
                return file.read(len(_MAGIC)) in (_MAGIC, b"")
        except OSError:
            return not Path(path).exists()

    @classmethod
    def _parsed(cls, data: memoryview) -> Saved:
        body, end = data[:-_DIGEST_SIZE], data[-_DIGEST_SIZE:]
        if _digest([body]) != end:
            raise ValueError("the digest")
        at = len(_MAGIC) + 8
        size = int.from_bytes(body[len(_MAGIC) : at], "little")
        if size > _MOST_HEADER:
            raise ValueError("the size of the header")
        header = json.loads(str(body[at : at + size], "utf-8", "surrogatepass"))
        n_tokens, state_size = int(header["n_tokens"]), int(header["state_size"])
        at += size
        state_at = at + 4 * n_tokens
        if n_tokens < 0 or state_at + state_size != len(body):
            raise ValueError("the sizes")
        tokens = _unpacked(bytes(body[at:state_at]))
        return cls(
            dict(header["model"]),
            dict(header["formats"]),
            str(header["engine"]),
            tokens,
            bytes(body[state_at:]),
            dict(header["more"]),
        )

    def differs(self, model: Model, params: ContextParams) -> str:
        """Why it is not for a context like that, in words; empty if it is."""
        if self.model.get("fingerprint") != fingerprint(model.parts):
            other = self.model.get("description", "")
            return f"it is of another model ({other}), not of {model.path.name}"
        for name, what in _FORMATS.items():
            own = str(getattr(params, name))
            if self.formats.get(name) != own:
                return f"its {what} is of {self.formats.get(name)}, not of {own}"
        return ""


def _packed(tokens: Sequence[int]) -> bytes:
    return _swapped(array("i", tokens)).tobytes()


def _unpacked(data: bytes) -> list[int]:
    return _swapped(array("i", data)).tolist()


def _swapped(values: array[int]) -> array[int]:
    """Little-endian, from and to what this machine has."""
    if array("H", b"\1\0")[0] != 1:
        values.byteswap()
    return values


def _digest(parts: Sequence[bytes | memoryview]) -> bytes:
    from blake3 import blake3

    hasher = blake3()
    for part in parts:
        hasher.update(part)
    return hasher.digest()


def _replace(target: Path, parts: Sequence[bytes]) -> None:
    """Write a file that is there as a whole, or not at all, whatever happens. Raises OSError."""
    with _beside(target) as (file, place):
        for part in parts:
            file.write(part)
        file.flush()
        os.fsync(file.fileno())
        os.replace(place, target)


@contextlib.contextmanager
def _beside(target: Path) -> Iterator[tuple[Any, str]]:
    """A new file in the same directory, which is gone afterwards unless it was moved."""
    descriptor, place = tempfile.mkstemp(prefix=f".{target.name}-", dir=target.parent)
    try:
        with open(descriptor, "wb") as file:
            yield file, place
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(place)
        raise
