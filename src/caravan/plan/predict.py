"""How long something takes on a pipeline: what the simulator says, for those who compare splits."""

from __future__ import annotations

from caravan.llm.params import KV_BLOCK
from caravan.plan.crowd import read_together
from caravan.plan.job import Job
from caravan.plan.pipeline import Pipeline
from caravan.plan.simulator import Run, decoding, share, simulate_prompt

# Steps of each lane: until they have found their order, and then those that count.
_WARM_UP, _COUNTED = 3, 6
# Of very many lanes over very many stages fewer count.
_MOST_EVENTS = 8000


def prompt_seconds(pipeline: Pipeline, n_prompt: int, concurrency: int = 1) -> float:
    """So many prompts that come together, of so many tokens each: until all have the logits of
    their last token.

    One alone is read by a context, several are read by a batcher. Raises ValueError for a pipeline
    in which no device has any layer.
    """
    if concurrency <= 1 or not n_prompt:
        return simulate_prompt(pipeline, n_prompt).seconds
    return read_together(Run(pipeline), n_prompt, concurrency)


def first_token_seconds(pipeline: Pipeline, n_prompt: int) -> float:
    """Until a request alone has its first token; raises as `prompt_seconds`."""
    return prompt_seconds(pipeline, n_prompt) + pipeline.setting.head.sample


def step_seconds(pipeline: Pipeline, n_kv: int, concurrency: int = 1) -> float:
    """Decoding, until each of so many requests has one token more: on the average of steps that
    follow others. Raises as `prompt_seconds`.

    Args:
        n_kv: tokens that each of them has.
    """
    run = Run(pipeline)
    lanes = share(max(1, concurrency), run.n_stages)
    counted = max(1, min(_COUNTED, _MOST_EVENTS // (len(lanes) * run.n_stages)))
    steps = _WARM_UP + counted
    ends: list[list[float]] = [[] for _ in lanes]
    threads = [
        decoding(run, n, n_kv - 1, steps, times, grow=False)
        for n, times in zip(lanes, ends, strict=True)
    ]
    run.go(*threads)
    # tokens a second of each lane: they need not be equally fast
    speeds = [
        n * counted / (times[-1] - times[-1 - counted])
        for n, times in zip(lanes, ends, strict=True)
    ]
    return sum(lanes) / sum(speeds)


def job_seconds(pipeline: Pipeline, job: Job) -> float:
    """Until all its requests are through; raises as `prompt_seconds`."""
    seconds = prompt_seconds(pipeline, job.prompt, job.concurrency) if job.prompt else 0.0
    n_steps = job.n_steps
    if not n_steps:
        return seconds
    # a step takes longer by the same for each block of the KV cache
    first = step_seconds(pipeline, job.prompt + 1, job.concurrency)
    blocks = [_block(job.prompt + 1), _block(job.prompt + n_steps)]
    if blocks[0] == blocks[1]:
        return seconds + n_steps * first
    last = step_seconds(pipeline, job.prompt + n_steps, job.concurrency)
    passed = sum(_block(job.prompt + 1 + step) - blocks[0] for step in range(n_steps))
    grown = passed / n_steps / (blocks[1] - blocks[0])
    return seconds + n_steps * (first + (last - first) * grown)


def _block(n_kv: int) -> int:
    return -(-n_kv // KV_BLOCK)
