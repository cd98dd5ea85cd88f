"""What a rehearsal records is what would travel, and nothing of it stays behind."""

from __future__ import annotations

import numpy as np
import pytest

from caravan.backend import callbacks
from caravan.backend import plugin as plugins
from caravan.backend.buffer import buffers
from caravan.backend.recording import RecordedGraph, joined, recording_devices
from caravan.engine import skeleton
from caravan.engine.layouts import OP_NAMES
from caravan.errors import ModelError, UsageError
from caravan.llm import ContextParams, ModelParams
from caravan.llm.rehearsal import Rehearsal, Step
from caravan.models.fake import FakeModel
from caravan.wire.records import EXT_TENSOR
from caravan.worker.cost import work
from caravan.worker.table import Table
from splitting import split_model

SHAPE = FakeModel(layers=6, embd=128, heads=4, kv_heads=2, ff=256, vocab=512, ctx=2048, type="F16")
CONTEXT = ContextParams(n_ctx=2048, n_ubatch=256)


@pytest.fixture(scope="module")
def described(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "described.gguf"
    SHAPE.write(path)
    return path


def products(graph: RecordedGraph) -> int:
    """Products of matrices, without those of nothing."""
    nodes = graph.rows[: graph.n_nodes]
    return int(((nodes["op"] == OP_NAMES.index("MUL_MAT")) & (nodes["ne"][:, 1] > 0)).sum())


def test_every_matrix_of_the_model_is_in_the_graph(described):
    with Rehearsal(described, ModelParams()) as rehearsal:
        prompt, decode = rehearsal.run(CONTEXT, [Step(64), Step(1, "all")])
    assert (rehearsal.n_layer, rehearsal.n_embd, rehearsal.n_vocab) == (6, 128, 512)
    assert decode.n_tokens == 1
    assert decode.n_kv == 256
    assert products(decode.graphs[0]) == 6 * 7 + 1
    flops, _ = work(Table(decode.graphs[0].rows, decode.graphs[0].n_nodes))
    least = 2 * (6 * (2 * 128 * 128 + 2 * 128 * 64 + 3 * 128 * 256) + 128 * 512)
    assert least < flops.sum() < 1.5 * least
    # of the last layer, what no output needs is cut away
    assert products(prompt.graphs[0]) == 6 * 7 - 3


def test_steps_that_follow_each_other_use_one_graph(described):
    with Rehearsal(described, ModelParams()) as rehearsal:
        steps = rehearsal.run(CONTEXT, [Step(1, "all")] * 3)
    assert [step.reused for step in steps] == [False, True, True]
    assert steps[2].graphs == steps[0].graphs


def test_two_devices_have_the_graph_of_one_between_them(described):
    with Rehearsal(described, ModelParams()) as rehearsal:
        (whole,) = rehearsal.run(CONTEXT, [Step(32, "all")])
    with Rehearsal(described, ModelParams(), 2) as rehearsal:
        (step,) = rehearsal.run(CONTEXT, [Step(32, "all")])
    assert sum(map(products, step.graphs)) == products(whole.graphs[0])
    assert step.crossed == (0, 32 * 128 * 4)
    assert step.written[0] - step.written[1] >= 32 * 128 * 4
    assert whole.crossed == (0,)


def test_a_device_without_layers_has_an_empty_graph(described):
    with Rehearsal(described, ModelParams(), 3, split=(3, 0, 4)) as rehearsal:
        (step,) = rehearsal.run(CONTEXT, [Step(8)])
    assert [graph.n_nodes > 0 for graph in step.graphs] == [True, False, True]
    assert step.graphs[1].rows.dtype == EXT_TENSOR


def test_a_step_may_go_back(described):
    with Rehearsal(described, ModelParams()) as rehearsal:
        steps = [Step(256), Step(256), Step(8, at=500), Step(8, at=0), Step(8, at=1000)]
        found = rehearsal.run(CONTEXT, steps)
    assert [step.n_kv for step in found] == [256, 512, 512, 256, 1024]


def test_sequences_take_steps_together(described):
    with Rehearsal(described, ModelParams()) as rehearsal:
        steps = rehearsal.run(CONTEXT, [Step(1, "all")] * 3, n_seqs=4)
    assert [step.n_tokens for step in steps] == [4, 4, 4]
    assert steps[2].reused
    assert steps[0].n_kv == 256


def test_logits_that_nobody_needs_are_not_in_the_graph(described):
    with Rehearsal(described, ModelParams()) as rehearsal:
        none, last, every = rehearsal.run(
            CONTEXT, [Step(16, outputs, at=0) for outputs in ("none", "last", "all")]
        )
    sizes = [
        graph.rows["ne"][: graph.n_nodes, :2].tolist()
        for graph in (none.graphs[0], last.graphs[0], every.graphs[0])
    ]
    assert [512, 1] in sizes[1]
    assert [512, 16] in sizes[2]
    assert [512, 0] in sizes[0]


def test_the_weights_of_a_real_file_are_not_read(smollm2):
    with Rehearsal(smollm2, ModelParams()) as rehearsal:
        first, again = rehearsal.run(ContextParams(n_ctx=512), [Step(1, "all"), Step(1, "all")])
        assert all(buffer.size for buffer in buffers.values())
    assert rehearsal.n_layer == 30
    assert again.reused
    # the embedding travels each time, and hardly anything else
    assert 576 * 4 <= again.sent[0] < first.sent[0]


def test_a_model_in_several_files_is_rehearsed(smollm2, tmp_path):
    paths = split_model(smollm2, tmp_path / "cut", 3)
    with Rehearsal(paths[0], ModelParams(), 2) as rehearsal:
        (step,) = rehearsal.run(ContextParams(n_ctx=512), [Step(1, "all")])
    assert sum(map(products, step.graphs)) == 30 * 7 + 1
    assert rehearsal.size > sum(path.stat().st_size for path in paths) * 0.9


def test_where_there_are_no_stand_ins_the_files_are_mapped(smollm2, monkeypatch):
    monkeypatch.setattr(skeleton, "available", lambda: False)
    with Rehearsal(smollm2, ModelParams()) as rehearsal:
        (step,) = rehearsal.run(ContextParams(n_ctx=512), [Step(1, "all")])
    assert products(step.graphs[0]) == 30 * 7 + 1


@pytest.mark.parametrize("step", [Step(257), Step(0), Step(1, "some")])
def test_what_is_not_one_micro_batch_is_refused(described, step):
    with Rehearsal(described, ModelParams()) as rehearsal, pytest.raises(UsageError):
        rehearsal.run(CONTEXT, [step])


def test_a_file_that_is_no_model_is_refused(tmp_path):
    path = tmp_path / "no.gguf"
    path.write_bytes(b"nothing")
    with pytest.raises(ModelError):
        Rehearsal(path, ModelParams())


def test_nothing_stays_behind(described):
    registry = list(plugins.load()._devices)
    kept = []
    for _ in range(3):
        with Rehearsal(described, ModelParams(), 2) as rehearsal:
            rehearsal.run(CONTEXT, [Step(8)])
        kept.append(len(callbacks._KEEP))
        assert not any(d.endpoint.startswith("rehearsal") for d in callbacks.owners.values())
        assert not any(buffer.device.simulated for buffer in buffers.values())
    assert kept[0] == kept[2]
    assert plugins.load()._devices == registry


def test_devices_say_what_memory_they_have():
    with recording_devices([(5, 7), (1, 2)]) as devices:
        assert [device.memory() for device in devices] == [(5, 7), (1, 2)]
        assert [device.name for device in devices] == ["RPC0", "RPC1"]
    with recording_devices([(3, 4)]) as devices:
        assert devices[0].memory() == (3, 4)


def test_an_error_in_a_callback_is_told(described, monkeypatch):
    from caravan.errors import WorkerLost

    with Rehearsal(described, ModelParams()) as rehearsal:

        def fails(graph):
            raise ValueError("no")

        monkeypatch.setattr(rehearsal._devices[0].link, "graph_compute", fails)
        with pytest.raises(WorkerLost, match="no"):
            rehearsal.run(CONTEXT, [Step(8)])


def test_graphs_of_one_step_become_one():
    def graph(n_nodes: int, n_rows: int, name: bytes) -> RecordedGraph:
        rows = np.zeros(n_rows, EXT_TENSOR)
        rows["src"] = rows["view_src"] = -1
        rows["name"] = [name + b"%d" % i for i in range(n_rows)]
        rows["src"][0, 0] = n_rows - 1
        return RecordedGraph(rows, n_nodes)

    both = joined([graph(1, 3, b"a"), graph(2, 3, b"b")])
    assert both.n_nodes == 3
    assert both.rows["name"].tolist() == [b"a0", b"b0", b"b1", b"a1", b"a2", b"b2"]
    assert both.rows["src"][:, 0].tolist() == [4, 5, -1, -1, -1, -1]
