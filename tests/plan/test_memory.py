"""The arithmetic of any split against dry runs of some."""

from __future__ import annotations

import pytest

from caravan.backend.recording import recording_devices
from caravan.errors import ModelError
from caravan.llm import ContextParams, ModelParams
from caravan.llm.planning import Planner
from caravan.models.fake import FakeModel
from caravan.plan.memory import MemoryModel
from e2e import shapes

GIB = 1 << 30
CONTEXT = ContextParams(n_ctx=4096)


@pytest.fixture(scope="module")
def files(tmp_path_factory, smollm2):
    directory = tmp_path_factory.mktemp("models")
    found = {"smollm2": smollm2, "wide": directory / "wide.gguf"}
    FakeModel(layers=24, embd=4096, heads=32, kv_heads=8, ff=8192, vocab=32000).write(found["wide"])
    for name in ("mamba", "experts", "windows"):
        found[name] = directory / f"{name}.gguf"
        getattr(shapes, name)(found[name])
    return found


def dry_run(path, counts):
    memory = [(1 << 40, 1 << 40)] * len(counts)
    with recording_devices(memory) as devices, Planner(path, tuple(devices)) as planner:
        found = planner.measure(ModelParams(), [float(count) for count in counts], CONTEXT)
    return found.needs.devices


def splits(total):
    third = total // 3
    return [
        [total],
        [total // 2, total - total // 2],
        [total - 1, 1],
        [1, total - 1],
        [third, third, total - 2 * third],
        [total - third - 2, third, 2],
        [2, 1, total - 5, 2],
        [1] * 4 + [total - 4],
        [third, 0, total - third],
    ]


@pytest.mark.parametrize("name", ["smollm2", "wide", "experts", "windows", "mamba"])
def test_it_says_what_a_dry_run_says(files, name):
    model = MemoryModel.of(files[name], ModelParams(), CONTEXT)
    for counts in splits(len(model.layers)):
        real = dry_run(files[name], counts)
        for told, found in zip(model.needs(counts, [(GIB, GIB)] * len(counts)), real, strict=True):
            assert (told.name, told.weights) == (found.name, found.weights), counts
            # a state that is there already is not told by its layers
            assert told.kv == pytest.approx(found.kv, rel=0.01 if name == "mamba" else 0), counts
            # where the engine puts nodes of a recurrent layer on its neighbour's device
            most = 1.4 if name == "mamba" else 1.03
            least = 0.8 if name == "wide" else 0.97
            assert least * found.compute <= told.compute <= most * found.compute, counts
            if name == "wide":
                assert told.need == pytest.approx(found.need, rel=0.03)


def test_layers_are_weights_and_kv(files):
    model = MemoryModel.of(files["smollm2"], ModelParams(), CONTEXT)
    assert len(model.layers) == 31
    # keys and values of 192 numbers of 2 bytes
    assert model.kv == (4096 * 2 * 192 * 2,) * 30 + (0,)
    assert model.layers[5] == model.weights[5] + model.kv[5]


def test_room_is_what_is_free_without_the_part_in_computing(files):
    model = MemoryModel.of(files["smollm2"], ModelParams(), CONTEXT)
    memory = [(GIB, 2 * GIB), (GIB, 2 * GIB), (0, 0)]
    known, other, unknown = model.room(memory)
    assert known == other < GIB * 0.98
    assert unknown > 1 << 60
    first, _, last = model.room([(GIB, GIB)] * 3, ordered=True)
    # the last one has the logits
    assert first > last == known
    counts = [10, 10, 11]
    needs = model.needs(counts, [(GIB, GIB)] * 3)
    assert max(need.compute for need in needs) <= GIB - last
    assert model.room([(GIB, GIB)])[0] == int(GIB * 0.98) - model.needs([31], [(0, 0)])[0].compute


def test_what_is_lacking(files):
    model = MemoryModel.of(files["wide"], ModelParams(), CONTEXT)
    needs = model.needs([10, 5, 10], [(1, 2), (3, 4), (0, 0)])
    assert [need.where for need in needs] == ["RPC0", "RPC1", "RPC2"]
    assert [(need.free, need.total) for need in needs] == [(1, 2), (3, 4), (0, 0)]
    assert needs[0].lacks > 0
    assert needs[2].lacks == 0


@pytest.mark.parametrize("layers", [1, 2, 3, 4])
def test_models_of_few_layers_have_a_model_too(tmp_path, layers):
    path = tmp_path / "few.gguf"
    FakeModel(layers=layers, embd=256, heads=4, kv_heads=4, ff=512, vocab=512).write(path)
    model = MemoryModel.of(path, ModelParams(), CONTEXT)
    assert len(model.layers) == layers + 1
    for counts in ([layers + 1], [layers, 1], [1, layers]):
        real = dry_run(path, counts)
        for told, found in zip(model.needs(counts, [(0, 0)] * len(counts)), real, strict=True):
            assert (told.weights, told.kv) == (found.weights, found.kv)
            assert told.compute >= found.compute * 0.9


def test_what_is_no_model_is_refused(tmp_path):
    path = tmp_path / "none.gguf"
    path.write_bytes(b"GGUF")
    with pytest.raises(ModelError):
        MemoryModel.of(path, ModelParams(), CONTEXT)
