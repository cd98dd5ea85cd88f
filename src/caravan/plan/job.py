"""`Job`: what a model is wanted for, so that splits can be compared by one number."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Job:
    """Some requests of one kind.

    Attributes:
        prompt: tokens that are read.
        generate: tokens that are written; 0: only the prompt counts.
        concurrency: requests at the same time.
    """

    prompt: int = 512
    generate: int = 128
    concurrency: int = 1

    @property
    def n_steps(self) -> int:
        """Decode steps of each request: its first token comes with the prompt, if there is one."""
        return max(0, self.generate - 1) if self.prompt else self.generate

    @property
    def depth(self) -> int:
        """Tokens that a request has in the middle of what it writes."""
        return self.prompt + self.generate // 2
