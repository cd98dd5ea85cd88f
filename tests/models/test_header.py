"""What is said of a file that is no model."""

from __future__ import annotations

import pytest

from caravan.errors import ModelError
from caravan.models.header import require_gguf


def test_a_model_is_let_through(tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF and so on")
    require_gguf(path)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "is not a GGUF file: it is empty"),
        (b"GGU", "is not a GGUF file: it ends after 'GGU'"),
        (b"PK\x03\x04...", r"is not a GGUF file: it begins with 'PK\x03\x04'"),
        (b"\xff\xfe\n\0 ...", r"is not a GGUF file: it begins with '\xff\xfe\n\x00'"),
    ],
)
def test_what_it_is_instead(tmp_path, content, told):
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelError) as caught:
        require_gguf(path)
    assert str(caught.value) == f"{path} {told}"


def test_a_file_that_cannot_be_read(tmp_path):
    with pytest.raises(ModelError, match=r"cannot read .*: Is a directory"):
        require_gguf(tmp_path)
