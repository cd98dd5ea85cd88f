"""What a GGUF header says, read from files written for the purpose."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

from caravan.errors import ModelError
from caravan.models.metadata import describe


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "small.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("Small")
    writer.add_block_count(3)
    writer.add_context_length(64)
    writer.add_embedding_length(16)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_1)
    writer.add_tensor("a", np.zeros((4, 8), dtype=np.float32))
    writer.add_tensor("b", np.zeros(5, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_describe_reads_the_header(model):
    info = describe(model)
    assert (info.name, info.architecture, info.file_type) == ("Small", "llama", "Q4_1")
    assert (info.layers, info.context, info.embedding) == (3, 64, 16)
    assert (info.parameters, info.tensors) == (37, 2)
    assert info.size == model.stat().st_size


def test_describe_leaves_out_what_the_file_does_not_say(tmp_path):
    path = tmp_path / "bare.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    info = describe(path)
    assert info.layers is None
    assert info.file_type is None
    assert info.parameters == 0


def test_describe_names_an_unknown_file_type(tmp_path):
    path = tmp_path / "new.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_file_type(999)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    assert describe(path).file_type == "unknown (999)"


def test_describe_refuses_another_format(tmp_path):
    path = tmp_path / "x.gguf"
    path.write_bytes(b"PK\x03\x04 something else")
    with pytest.raises(ModelError, match="is not a GGUF file"):
        describe(path)


def test_describe_refuses_a_file_cut_off_anywhere(model, tmp_path):
    whole = model.read_bytes()
    cut = tmp_path / "cut.gguf"
    for length in range(4, len(whole), 37):
        cut.write_bytes(whole[:length])
        with pytest.raises(ModelError):
            describe(cut)


def test_describe_refuses_a_missing_file(tmp_path):
    with pytest.raises(ModelError, match="No such file"):
        describe(tmp_path / "none.gguf")
