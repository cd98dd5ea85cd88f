"""What a GGUF file says about itself, without loading the model.

Called by `caravan model show`. Reads the header through the `gguf` package, which it imports only
when asked, and never the engine.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from caravan.errors import ModelError
from caravan.models.fake import described_size
from caravan.models.header import require_gguf
from caravan.models.splits import parts


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What the files of one model say; None where they do not.

    Attributes:
        path: the file, or the first of several.
        files: how many there are.
        parameters, tensors: in all of them.
        size: bytes of all files; with the data of all tensors if there is only a header.
        fake: whether it is: see `caravan.models.fake`.
    """

    path: str
    files: int
    name: str | None
    architecture: str | None
    file_type: str | None
    parameters: int
    layers: int | None
    context: int | None
    embedding: int | None
    tensors: int
    size: int
    fake: bool


def describe(path: Path) -> ModelInfo:
    """Read the header of a GGUF file, and of those that belong to it.

    Raises ModelError if one is no GGUF file, is cut off or missing.
    """
    fake = described_size(path)
    files = (path,) if fake else parts(path)
    readers = [_open_fake(path, fake)] if fake else [_open(file) for file in files]
    # the metadata are in the first file alone
    reader = readers[0]
    tensors = [tensor for each in readers for tensor in each.tensors]
    architecture = _field(reader, "general.architecture")

    def of_architecture(key: str) -> int | None:
        value = _field(reader, f"{architecture}.{key}")
        return value if isinstance(value, int) else None

    return ModelInfo(
        path=str(files[0]),
        files=len(files),
        name=_text(_field(reader, "general.name")),
        architecture=_text(architecture),
        file_type=_file_type(_field(reader, "general.file_type")),
        parameters=sum(int(tensor.n_elements) for tensor in tensors),
        layers=of_architecture("block_count"),
        context=of_architecture("context_length"),
        embedding=of_architecture("embedding_length"),
        tensors=len(tensors),
        size=fake or sum(file.stat().st_size for file in files),
        fake=fake > 0,
    )


def _open(path: Path) -> Any:
    require_gguf(path)
    from gguf import GGUFReader

    try:
        return GGUFReader(path)
    # The reader maps the file and slices it: what it raises on a cut-off one depends on the place.
    except Exception as exc:
        raise ModelError(f"{path} is cut off or damaged: {exc}") from exc


def _open_fake(path: Path, size: int) -> Any:
    """The reader wants to map the data as well: a file with a hole in place of it does."""
    with tempfile.NamedTemporaryFile(suffix=".gguf") as whole:
        try:
            whole.write(path.read_bytes())
            whole.truncate(size)
            whole.flush()
        except OSError as exc:
            raise ModelError(f"cannot read {path}: {exc.strerror or exc}") from exc
        return _open(Path(whole.name))


def _field(reader: Any, key: str) -> Any:
    field = reader.fields.get(key)
    return None if field is None else field.contents()


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _file_type(value: Any) -> str | None:
    if not isinstance(value, int):
        return None
    from gguf import LlamaFileType

    try:
        return str(LlamaFileType(value).name).removeprefix("MOSTLY_")
    except ValueError:
        return f"unknown ({value})"
