"""`Candidates`: the tokens that may come next, as the engine's samplers take them."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from caravan import engine
from caravan.engine.llama import TOKEN_DATA, TokenDataArray

_TOKEN = ctypes.c_int32


class Candidates:
    """A llama_token_data_array. One thread at a time; samplers change what is in it.

    Args:
        size: tokens of the vocabulary.
    """

    def __init__(self, size: int) -> None:
        self._llama = engine.load().llama
        self._ids = np.arange(size, dtype=np.int32)
        self._data: NDArray[Any] = np.zeros(size, TOKEN_DATA)
        self._array = TokenDataArray()

    def fill(self, logits: NDArray[np.float32], without: Iterable[int] = ()) -> None:
        """All tokens, those of `without` with no chance."""
        self._data["id"] = self._ids
        self._data["logit"] = logits
        for token in without:
            self._data["logit"][token] = -np.inf
        self._begin(len(self._data))

    def fill_one(self, token: int) -> None:
        """This token alone."""
        self._data[0] = token, 1.0, 0.0
        self._begin(1)

    def _begin(self, size: int) -> None:
        self._array.data = self._data.ctypes.data
        self._array.size, self._array.selected, self._array.sorted = size, -1, False

    def apply(self, sampler: int) -> None:
        """Have a llama_sampler change it."""
        self._llama.sampler_apply(sampler, ctypes.byref(self._array))

    @property
    def first_is_possible(self) -> bool:
        """Whether a sampler has left the first one a chance."""
        return bool(self._data["logit"][0] > -np.inf)

    def selected(self) -> int:
        """The token that a sampler has chosen."""
        # the samplers may put the data elsewhere
        at = self._array.data + self._array.selected * TOKEN_DATA.itemsize
        return _TOKEN.from_address(at).value
