"""What one test does, and what is inside its clock."""

from __future__ import annotations

import itertools

import pytest

from bench.fakes import HOST, FakeClock, FakeModel, case_of
from caravan.bench.plan import Case
from caravan.bench.run import Runner, RunSettings


class Bench:
    """A runner over fakes, with everything written down."""

    def __init__(self, *, fits: bool = True, bos: int | None = 1, **settings: object) -> None:
        self.log: list[str] = []
        self.said: list[str] = []
        self.clock = FakeClock()
        self.models: list[FakeModel] = []
        self.fits, self.bos = fits, bos
        run = RunSettings(**{"repetitions": 2, **settings})  # type: ignore[arg-type]
        self.runner = Runner(self.load, HOST, run, say=self.said.append, clock=self.clock)

    def load(self, case: Case) -> FakeModel:
        self.log.append("load")
        self.models.append(FakeModel(self.log, self.clock, self.bos, fits=self.fits))
        return self.models[-1]

    def take(self) -> list[str]:
        taken, self.log[:] = list(self.log), []
        return taken


def test_prompt_test_waits_once_for_all_batches() -> None:
    bench = Bench()
    result = bench.runner.run(case_of(n_prompt=10, n_batch=4))
    prompt = ["decode 4", "decode 4", "decode 2", "synchronize"]
    repetition = ["clear", *prompt]
    assert bench.take() == [
        "load", "context 10", "clear", *prompt, *repetition, *repetition, "close context",
    ]  # fmt: skip
    assert result.samples_ns == [10_000_000, 10_000_000]
    assert result.avg_ts == pytest.approx(1000)


def test_generation_waits_for_every_token_and_warms_up_with_one() -> None:
    bench = Bench(repetitions=1)
    bench.runner.run(case_of(n_prompt=0, n_gen=3))
    token = ["decode 1", "synchronize"]
    assert bench.take()[3:] == [*token, "clear", *token * 3, "close context"]


def test_pair_is_one_sample() -> None:
    bench = Bench(repetitions=1, warmup=False)
    result = bench.runner.run(case_of(n_prompt=6, n_gen=2))
    assert result.samples_ns == [8_000_000]
    assert result.avg_ts == pytest.approx(1000)


def test_depth_is_filled_outside_the_clock_then_restored() -> None:
    bench = Bench(repetitions=2, warmup=False)
    result = bench.runner.run(case_of(n_prompt=4, n_depth=6))
    assert result.samples_ns == [4_000_000, 4_000_000]
    assert bench.take()[2:] == [
        "clear",
        *("clear", "decode 6", "synchronize", "save", "decode 4", "synchronize"),
        *("clear", "restore", "decode 4", "synchronize"),
        "close context",
    ]


def test_a_later_test_of_equal_depth_restores() -> None:
    bench = Bench(repetitions=1, warmup=False)
    bench.runner.run(case_of(n_depth=6))
    bench.take()
    bench.runner.run(case_of(n_prompt=0, n_gen=1, n_depth=6))
    assert "restore" in bench.take()


def test_another_model_file_fills_the_depth_anew() -> None:
    bench = Bench(repetitions=1, warmup=False)
    bench.runner.run(case_of(n_depth=6))
    bench.runner.run(case_of(n_depth=6, model="other"))
    assert "restore" not in bench.take()


def test_a_state_that_does_not_fit_is_filled_anew() -> None:
    bench = Bench(fits=False, warmup=False)
    bench.runner.run(case_of(n_depth=6))
    assert bench.take().count("decode 6") == 2
    assert [line for line in bench.said if "cached" in line] == []


def test_the_model_is_kept_while_it_can_be_and_closed_before_the_next() -> None:
    bench = Bench(warmup=False, repetitions=0)
    for case in (case_of(), case_of(n_batch=4), case_of(repack=False)):
        bench.runner.run(case)
    bench.runner.close()
    assert [line for line in bench.take() if "context" not in line] == [
        "load", "clear", "clear", "close model", "load", "clear", "close model",
    ]  # fmt: skip


def test_tokens_begin_with_bos_if_the_vocabulary_wants_it() -> None:
    bench = Bench(warmup=False, repetitions=1)
    bench.runner.run(case_of(n_prompt=50, n_batch=20))
    batches = bench.models[0].contexts[0].decoded
    assert batches[0][0] == 1
    tokens = list(itertools.chain(*batches))
    assert len(set(tokens)) > 10 and all(0 <= token < 100 for token in tokens)


def test_without_bos_all_tokens_are_random() -> None:
    firsts = set()
    bench = Bench(bos=None, warmup=False, repetitions=9)
    bench.runner.run(case_of(n_prompt=1))
    firsts = {batch[0] for batch in bench.models[0].contexts[0].decoded}
    assert len(firsts) > 3


def test_progress_lines() -> None:
    bench = Bench()
    bench.runner.run(case_of(n_prompt=4, n_gen=2, n_depth=3), "benchmark 2/7")
    assert bench.said == [
        f"benchmark 2/7: {text}"
        for text in (
            "starting",
            "warmup prompt run",
            "warmup generation run",
            "depth run 1/2",
            "prompt run 1/2",
            "generation run 1/2",
            "depth run 2/2 (cached)",
            "prompt run 2/2",
            "generation run 2/2",
        )
    ]


def test_an_error_closes_the_context() -> None:
    bench = Bench(warmup=False)
    model = FakeModel(bench.log, bench.clock)

    def fail() -> None:
        raise KeyboardInterrupt

    model.on_decode = fail
    runner = Runner(lambda case: model, HOST, RunSettings())
    with pytest.raises(KeyboardInterrupt):
        runner.run(case_of())
    assert bench.take()[-1] == "close context"
