"""`Race`: from which prompt on several devices have the first token sooner than one.

A request alone, by the simulator. Called by `planner`.
"""

from __future__ import annotations

from caravan.plan.pipeline import Pipeline
from caravan.plan.predict import first_token_seconds

# A smaller lead is noise: a prompt of one micro-batch takes equally long on several equal devices.
CLEAR = 1.01
_GRID = 32  # tokens
_POINTS = 24


class Race:
    """Against the best single device.

    Args:
        single: None: there is none.
        n_ctx: tokens of the longest prompt.
    """

    def __init__(self, single: Pipeline | None, n_ctx: int) -> None:
        self._single = single
        self._n_ctx = n_ctx
        self._seconds: dict[int, float] = {}

    def break_even(self, pipeline: Pipeline, most: int | None = None) -> int | None:
        """Tokens of a prompt from which on a pipeline is clearly faster, up to the longest.

        0: always. None: never, or not with the longest.

        Args:
            most: tokens of the longest prompt that is tried.
        """
        if self._single is None:
            return 0
        won = _on_grid(min(self._n_ctx, most or self._n_ctx))
        if pipeline == self._single or self.lead(pipeline, won) < CLEAR:
            return None
        lost = _on_grid(won // 2)
        while lost < won and self.lead(pipeline, lost) >= CLEAR:
            won, lost = lost, _on_grid(lost // 2)
        if lost == won:
            return 0
        while won - lost > _GRID:
            middle = _on_grid((won + lost) // 2)
            if self.lead(pipeline, middle) >= CLEAR:
                won = middle
            else:
                lost = middle
        return won

    def curve(self, pipeline: Pipeline) -> tuple[tuple[int, float], ...]:
        """(tokens, lead) from short prompts to the longest; nothing without a single device."""
        if self._single is None:
            return ()
        ratio = max(self._n_ctx / _GRID, 1.0) ** (1 / (_POINTS - 1))
        lengths = {_on_grid(round(_GRID * ratio**point)) for point in range(_POINTS)}
        return tuple((n_prompt, self.lead(pipeline, n_prompt)) for n_prompt in sorted(lengths))

    def lead(self, pipeline: Pipeline, n_prompt: int) -> float:
        """How many times as soon a pipeline has the first token."""
        assert self._single is not None
        if n_prompt not in self._seconds:
            self._seconds[n_prompt] = first_token_seconds(self._single, n_prompt)
        return self._seconds[n_prompt] / first_token_seconds(pipeline, n_prompt)


def _on_grid(n_prompt: int) -> int:
    return max(_GRID, n_prompt // _GRID * _GRID)
