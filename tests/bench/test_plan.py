"""Which tests a grid means, in which order, and when a model is loaded again."""

from __future__ import annotations

import pytest

from bench.fakes import all_cases, case_of
from caravan.bench.plan import same_model


def test_default_is_one_prompt_and_one_generation() -> None:
    assert [(case.n_prompt, case.n_gen) for case in all_cases()] == [(512, 0), (0, 128)]


def test_prompts_then_generations_then_pairs() -> None:
    found = all_cases(n_prompt="1,2", n_gen="3,4", n_pg="5,6")
    work = [(case.n_prompt, case.n_gen) for case in found]
    assert work == [(1, 0), (2, 0), (0, 3), (0, 4), (5, 6)]


def test_zero_drops_a_kind() -> None:
    assert [case.n_gen for case in all_cases(n_prompt="0", n_gen="3")] == [3]
    assert all_cases(n_prompt="0", n_gen="0", n_pg="0,0") == []


def test_later_options_change_faster() -> None:
    found = all_cases(n_prompt="8", n_gen="0", n_ubatch="64,32", devices="RPC0,RPC0/RPC1")
    assert [(case.devices, case.n_ubatch) for case in found] == [
        (("RPC0",), 64),
        (("RPC0",), 32),
        (("RPC0", "RPC1"), 64),
        (("RPC0", "RPC1"), 32),
    ]


def test_depth_is_inside_threads_and_outside_the_work() -> None:
    found = all_cases(n_threads="1,2", n_depth="0,9")
    assert [(case.n_threads, case.n_depth, case.n_prompt) for case in found] == [
        (threads, depth, prompt) for threads in (1, 2) for depth in (0, 9) for prompt in (512, 0)
    ]


def test_the_context_is_as_large_as_the_test() -> None:
    assert case_of(n_prompt=5, n_gen=6, n_depth=7).n_ctx == 18


@pytest.mark.parametrize(
    ("change", "same"),
    [
        ({"n_batch": 1}, True),
        ({"embeddings": True}, True),
        ({"no_op_offload": True}, True),
        ({"n_depth": 5, "n_threads": 9, "type_k": "q8_0"}, True),
        ({"model": "other"}, False),
        ({"n_gpu_layers": 3}, False),
        ({"devices": ("RPC0",)}, False),
        ({"tensor_split": (1.0, 2.0)}, False),
        ({"repack": False}, False),
        ({"lazy_mode": "on"}, False),
    ],
)
def test_only_model_options_need_another_model(change: dict[str, object], same: bool) -> None:
    assert same_model(case_of(), case_of(**change)) is same
