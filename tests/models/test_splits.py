"""Which files make up a model, and what is said when they do not."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from caravan.errors import ModelError
from caravan.models import resolve
from caravan.models.metadata import describe
from caravan.models.splits import first_part, is_later_part, parts, read_parts
from caravan.models.tensors import read_tensors
from models import handmade
from models.handmade import I32, U16, U32
from splitting import split_model

COUNT = 3


def part(
    number: int, count: int = COUNT, tensors: int = COUNT, *, name: str | None = None
) -> bytes:
    """A part with one tensor; `number` counts from 1."""
    keys = [
        handmade.key(b"split.no", U16, number - 1),
        handmade.key(b"split.count", U16, count),
        handmade.key(b"split.tensors.count", I32, tensors),
    ]
    tensor = handmade.tensor((name or f"t{number}").encode(), (4,), 0, 0)
    return handmade.gguf(keys, [tensor], bytes(16))


def paths(directory: Path, count: int = COUNT) -> list[Path]:
    return [directory / f"m-{i:05}-of-{count:05}.gguf" for i in range(1, count + 1)]


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    found = paths(tmp_path)
    for number, path in enumerate(found, 1):
        path.write_bytes(part(number))
    return found


def test_any_part_leads_to_all(files):
    for path in files:
        assert parts(path) == tuple(files)
        assert first_part(path) == resolve(path) == files[0]


def test_headers_come_with_the_parts(files):
    assert [list(found.header.tensors) for found in read_parts(files[1])] == [
        ["t1"],
        ["t2"],
        ["t3"],
    ]


def test_a_whole_model_is_itself(tmp_path, smollm2):
    assert parts(smollm2) == (smollm2,)
    assert resolve(smollm2) == smollm2


def test_links_lead_to_the_parts_beside_them(files, tmp_path):
    """Download caches keep the content under other names."""
    names = tmp_path / "names"
    names.mkdir()
    for i, path in enumerate(files):
        blob = path.rename(tmp_path / f"blob{i}")
        (names / path.name).symlink_to(blob)
    assert parts(names / files[2].name) == tuple(names / path.name for path in files)


def test_the_current_directory_has_no_name(files, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert parts(Path(files[1].name)) == tuple(Path(path.name) for path in files)


def test_one_of_one(tmp_path):
    path = tmp_path / "m-00001-of-00001.gguf"
    path.write_bytes(part(1, 1, 1))
    assert parts(path) == (path,)


def test_a_missing_part_is_named(files):
    files[1].unlink()
    for path in (files[0], files[2]):
        with pytest.raises(ModelError, match=r"there beside it: m-00002-of-00003\.gguf$"):
            parts(path)
    files[0].unlink()
    assert resolve(files[2]) == files[2]
    with pytest.raises(ModelError, match=r"part 3 of 3 .*: m-00001-of-00003\.gguf, m-00002-of"):
        parts(files[2])


def test_many_missing_parts_are_counted(tmp_path):
    path = paths(tmp_path, 65535)[0]
    path.write_bytes(part(1, 65535))
    with pytest.raises(ModelError, match=r"m-00004-of-65535\.gguf and 65531 more$"):
        parts(path)


@pytest.mark.parametrize(
    "name",
    [
        "m.gguf",
        "m-00002-of-00003.gguf",
        "m-00001-of-00002.gguf",
        "m-1-of-3.gguf",
        "m-00001-of-00003.gguf.part",
        "m-00000-of-00003.gguf",
        "m-\u0660\u0660\u0660\u0660\u0661-of-00003.gguf",
    ],
)
def test_a_part_under_another_name(files, tmp_path, name):
    other = tmp_path / "other" / name
    other.parent.mkdir()
    other.write_bytes(files[0].read_bytes())
    told = r"is part 1 of 3 of a model and has to be called NAME-00001-of-00003\.gguf"
    with pytest.raises(ModelError, match=told):
        parts(other)


def test_a_whole_model_with_the_name_of_a_part(files, tmp_path):
    """Such as a checkpoint of a training: it is what it is."""
    files[1].write_bytes(handmade.gguf([], []))
    assert first_part(files[1]) == files[1]
    assert parts(files[1]) == (files[1],)
    with pytest.raises(ModelError, match="is not part 2 of 3: it says that it is no part"):
        parts(files[0])


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (part(3), "is not part 2 of 3: it says that it is part 3 of 3"),
        (part(2, 4), "is not part 2 of 3: it says that it is part 2 of 4"),
        (part(2)[:-1], "is cut off"),
        (part(2)[:40], "is cut off"),
        (part(2, name="t1"), r"and m-00001-of-00003\.gguf both have the tensor 't1'"),
        (b"PK\x03\x04", "is not a GGUF file"),
        (b"", "is not a GGUF file"),
    ],
)
def test_a_part_that_is_wrong_is_named(files, content, told):
    files[1].write_bytes(content)
    with pytest.raises(ModelError, match=told) as caught:
        parts(files[0])
    assert str(caught.value).startswith(str(files[1]))


def test_a_part_that_is_no_file(files):
    files[1].unlink()
    files[1].mkdir()
    with pytest.raises(ModelError, match=f"cannot read {files[1]}"):
        parts(files[0])
    files[1].rmdir()
    os.symlink(files[1], files[1])
    with pytest.raises(ModelError, match="not there beside it"):
        parts(files[0])


def test_tensors_that_nobody_has(files):
    files[0].write_bytes(part(1, tensors=4))
    with pytest.raises(ModelError, match="counts 4 tensors in its 3 parts, which have 3"):
        parts(files[0])


def test_a_number_beyond_all(tmp_path):
    path = tmp_path / "m-00001-of-00003.gguf"
    path.write_bytes(handmade.gguf([handmade.key(b"split.count", U32, (1 << 32) - 1)], []))
    with pytest.raises(ModelError, match=r"is part 1 of 4294967295 .* has to be called"):
        parts(path)


def test_names():
    assert not is_later_part("m-00001-of-00003.gguf")
    assert is_later_part("m-00002-of-00003.gguf")
    assert not is_later_part("m-00004-of-00003.gguf")
    assert not is_later_part("m.gguf")


def test_a_directory_is_told_by_first_parts(files, tmp_path):
    with pytest.raises(ModelError, match=r"holds m-00001-of-00003\.gguf\)"):
        resolve(tmp_path / "missing.gguf")


@pytest.mark.parametrize("empty_first", [False, True])
def test_parts_have_together_what_the_whole_has(smollm2, tmp_path, empty_first):
    files = split_model(smollm2, tmp_path / "m", 3, empty_first=empty_first)
    found = read_parts(files[2])
    assert tuple(path for path, _ in found) == tuple(files)
    assert (found[0].header.architecture, found[0].header.layers) == ("llama", 30)
    whole, data = read_tensors(smollm2), smollm2.read_bytes()
    names = []
    for path, header in found:
        part_data = path.read_bytes()
        for name, (offset, size) in header.tensors.items():
            names.append(name)
            start = whole[name].offset
            assert part_data[offset : offset + size] == data[start : start + size]
    assert names == list(whole)


def test_a_description_is_of_all_parts(smollm2, tmp_path):
    files = split_model(smollm2, tmp_path / "m", 3)
    whole, split = describe(smollm2), describe(files[1])
    assert (whole.files, split.files) == (1, 3)
    assert split.path == str(files[0])
    assert split.size == sum(path.stat().st_size for path in files)
    for field in ("name", "architecture", "file_type", "parameters", "layers", "tensors"):
        assert getattr(split, field) == getattr(whole, field)
