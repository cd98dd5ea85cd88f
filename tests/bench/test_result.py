"""The record: the 42 fields, ours after them, and the statistics."""

from __future__ import annotations

import pytest

from bench.fakes import result_of
from caravan.bench.result import BY_NAME, FIELDS, LLAMA_BENCH_FIELDS, Kind

# Read off llama-bench; scripts of its users rely on names, order and count.
NAMES = tuple(
    """
build_commit build_number cpu_info gpu_info backends model_filename model_type model_size
model_n_params n_batch n_ubatch n_threads cpu_mask cpu_strict poll type_k type_v n_gpu_layers
n_cpu_moe split_mode main_gpu no_kv_offload flash_attn devices tensor_split tensor_buft_overrides
load_mode lazy_mode embeddings no_op_offload no_host repack fit_target fit_min_ctx n_prompt n_gen
n_depth test_time avg_ns stddev_ns avg_ts stddev_ts
""".split()  # noqa: SIM905
)


def test_the_42_fields_come_first_and_in_order() -> None:
    assert len(NAMES) == 42
    assert [field.name for field in LLAMA_BENCH_FIELDS] == list(NAMES)
    assert [field.name for field in FIELDS[:42]] == list(NAMES)
    assert FIELDS[42].name == "caravan_version"


def test_kinds() -> None:
    kinds = {
        kind: {field.name for field in LLAMA_BENCH_FIELDS if field.kind is kind} for kind in Kind
    }
    assert kinds[Kind.BOOLEAN] == {
        "cpu_strict", "no_kv_offload", "embeddings", "no_host", "repack",
    }  # fmt: skip
    assert kinds[Kind.REAL] == {"avg_ts", "stddev_ts"}
    assert {"no_op_offload", "flash_attn", "fit_target", "build_number"} <= kinds[Kind.INTEGER]
    assert {"load_mode", "lazy_mode", "devices", "test_time"} <= kinds[Kind.TEXT]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("build_commit", "caravan 0.1.0, ggml 0.26.0"),
        ("build_number", "3"),
        ("model_filename", "m.gguf"),
        ("model_size", "98000000"),
        ("cpu_strict", "0"),
        ("repack", "1"),
        ("flash_attn", "-1"),
        ("devices", "auto"),
        ("tensor_split", "0.00"),
        ("tensor_buft_overrides", "none"),
        ("test_time", "2026-11-29T12:00:00Z"),
        ("avg_ns", "1000000000"),
        ("stddev_ns", "0"),
        ("avg_ts", "8.000000"),
    ],
)
def test_texts_of_defaults(name: str, text: str) -> None:
    assert BY_NAME[name].text(result_of()) == text


def test_texts_of_lists() -> None:
    result = result_of(
        devices=("RPC0", "RPC1"),
        tensor_split=(1.0, 0.0, 2.5),
        tensor_buft_overrides=(("a", "CPU"), ("b", "RPC0[h:1]")),
    )
    assert BY_NAME["devices"].text(result) == "RPC0/RPC1"
    assert BY_NAME["tensor_split"].text(result) == "1.00/0.00/2.50"
    assert BY_NAME["tensor_buft_overrides"].text(result) == "a=CPU;b=RPC0[h:1]"


def test_statistics_are_of_a_sample() -> None:
    result = result_of([1_000_000_000, 2_000_000_000, 3_000_000_000], n_prompt=6)
    assert (result.avg_ns, result.stddev_ns) == (2_000_000_000, 1_000_000_000)
    assert result.samples_ts == [6, 3, 2]
    assert result.avg_ts == pytest.approx(11 / 3)
    assert result.stddev_ts == pytest.approx(2.0816660)


def test_no_sample_and_one_sample() -> None:
    assert (result_of([]).avg_ts, result_of([]).stddev_ns) == (0, 0)
    assert result_of([5]).stddev_ts == 0


@pytest.mark.parametrize(
    ("work", "name"),
    [
        ((512, 0, 0), "pp512"),
        ((0, 128, 0), "tg128"),
        ((512, 128, 0), "pp512+tg128"),
        ((512, 0, 4096), "pp512 @ d4096"),
        ((1, 2, 3), "pp1+tg2 @ d3"),
    ],
)
def test_names_of_tests(work: tuple[int, int, int], name: str) -> None:
    n_prompt, n_gen, n_depth = work
    assert result_of(n_prompt=n_prompt, n_gen=n_gen, n_depth=n_depth).test_name == name
