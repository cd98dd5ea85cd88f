"""The markdown table, character by character as llama-bench prints it."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest

from bench.fakes import FACTS, HOST, result_of
from caravan.bench.result import Host, Result
from caravan.bench.table import MarkdownPrinter, columns, params_text, size_text

RPC = replace(HOST, backends="RPC")
ALL = {
    "n_cpu_moe", "n_threads", "cpu_mask", "cpu_strict", "poll", "n_batch", "n_ubatch", "type_k",
    "type_v", "main_gpu", "split_mode", "no_kv_offload", "flash_attn", "devices", "tensor_split",
    "tensor_buft_overrides", "load_mode", "lazy_mode", "embeddings", "no_op_offload", "no_host",
    "repack", "fit_target", "fit_min_ctx", "n_prompt", "model",
}  # fmt: skip


def table(host: Host, shown: set[str], *results: Result) -> list[str]:
    out = io.StringIO()
    printer = MarkdownPrinter(out, host, shown)
    printer.header()
    for result in results:
        printer.result(result)
    printer.footer()
    return out.getvalue().splitlines()


def test_cpu_table() -> None:
    assert table(HOST, set(), result_of([8_000_000, 8_100_000])) == [
        "| model                          |       size |     params | backend    | threads |"
        "            test |                  t/s |",
        "| ------------------------------ | ---------: | ---------: | ---------- | ------: |"
        " --------------: | -------------------: |",
        "| llama ?B Q4_1                  |  93.46 MiB |   134.52 M | CPU        |       4 |"
        "             pp8 |        993.83 ± 8.73 |",
        "",
        "build: caravan 0.1.0, ggml 0.26.0 (3)",
    ]


def test_rpc_table_with_devices() -> None:
    result = result_of(
        host=RPC, devices=("RPC0", "RPC1"), tensor_split=(1.0, 1.0), n_ubatch=256, n_gpu_layers=99
    )
    lines = table(RPC, {"devices", "tensor_split", "n_ubatch", "n_gpu_layers"}, result)
    assert lines[0] == (
        "| model                          |       size |     params | backend    | ngl | n_ubatch |"
        " dev          | ts           |            test |                  t/s |"
    )
    assert lines[1] == (
        "| ------------------------------ | ---------: | ---------: | ---------- | --: | -------: |"
        " ------------ | ------------ | --------------: | -------------------: |"
    )
    assert lines[2] == (
        "| llama ?B Q4_1                  |  93.46 MiB |   134.52 M | RPC        |  99 |      256 |"
        " RPC0/RPC1    | 1.00/1.00    |             pp8 |          8.00 ± 0.00 |"
    )


def test_order_headings_and_widths_of_all_optional_columns() -> None:
    found = [(c.heading, -c.width if c.left else c.width) for c in columns(RPC, ALL)]
    assert found == [
        ("model", -30), ("size", 10), ("params", 10), ("backend", -10), ("ngl", 3),
        ("n_cpu_moe", 10), ("threads", 7), ("cpu_mask", -10), ("cpu_strict", 10), ("poll", 10),
        ("n_batch", 7), ("n_ubatch", 8), ("type_k", 6), ("type_v", 6), ("main_gpu", 10), ("sm", 6),
        ("nkvo", 13), ("fa", 3), ("dev", -12), ("ts", -12), ("ot", -21), ("lm", 10),
        ("lazy_mode", -10), ("embd", 10), ("nopo", 4), ("noh", 4), ("rpk", 3), ("fitt", 10),
        ("fitc", 11), ("test", 15), ("t/s", 20),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("backends", "ngl", "threads"),
    [
        ("CPU", False, True),
        ("BLAS", False, True),
        ("BLAS,RPC", False, True),
        ("RPC", True, False),
        ("CUDA,RPC", True, False),
    ],
)
def test_layers_or_threads_by_backend(backends: str, ngl: bool, threads: bool) -> None:
    headings = [column.heading for column in columns(replace(HOST, backends=backends), set())]
    assert (("ngl" in headings), ("threads" in headings)) == (ngl, threads)


def test_threads_also_appear_with_a_gpu_when_they_were_chosen() -> None:
    headings = [column.heading for column in columns(RPC, {"n_threads"})]
    assert headings[4:6] == ["ngl", "threads"]


def test_sizes() -> None:
    assert size_text((1 << 30) - 1) == "1024.00 MiB"
    assert size_text(1 << 30) == "1.00 GiB"
    assert params_text(999_999_999) == "1000.00 M"
    assert params_text(1_000_000_000) == "1.00 B"
    assert size_text(FACTS.size) == "93.46 MiB"
