"""`Vocabulary`: a model's tokens, texts to tokens and back.

Apart from `Model` because it is needed while the weights are nowhere: then it is the vocabulary of
a model without weights. Any thread may ask.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path

from caravan import engine
from caravan.errors import ModelError, UsageError
from caravan.llm import orphans

_NONE = 0  # LLAMA_VOCAB_TYPE_NONE
_TEMPLATES = ("", "tool_use")

_SHORTEST_PROBE = 4
_PROBES_OF_A_KIND = 20


class Vocabulary:
    """See the module.

    Args:
        path: of the model, for errors.
        handle: the llama_model.

    Attributes:
        size: tokens.
        has_texts: whether they stand for texts; some files have their number alone.
        bos, eos: the tokens that begin and end a sequence, or None.
        add_bos: whether a prompt begins with `bos`.
        chat_templates: the model's own (Jinja) by name, as far as it has them: the usual one has
            none, `tool_use` is another for conversations with tools.
    """

    def __init__(self, path: Path, handle: int) -> None:
        self._path = path
        self._llama = llama = engine.load().llama
        # held in each short call, so that nothing is freed meanwhile
        self._lock = threading.Lock()
        # by address: how many are in `held`
        self._holders: Counter[int] = Counter()
        self._left = threading.Condition(self._lock)
        self._own = 0
        self._vocab: int = llama.model_get_vocab(handle)
        self.size: int = llama.vocab_n_tokens(self._vocab)
        self.has_texts: bool = llama.vocab_type(self._vocab) != _NONE
        bos: int = llama.vocab_bos(self._vocab)
        self.bos = bos if bos >= 0 else None
        eos: int = llama.vocab_eos(self._vocab)
        self.eos = eos if eos >= 0 else None
        self.add_bos: bool = llama.vocab_get_add_bos(self._vocab)
        self.chat_templates: dict[str, str] = {}
        for name in _TEMPLATES:
            text = llama.model_chat_template(handle, name.encode() or None)
            if text is not None:
                self.chat_templates[name] = text.decode("utf-8", "replace")

    def outlive(self, load: Callable[[], int]) -> None:
        """The model will be freed: from now on, do with one that has no weights, as `load` gives.

        It belongs to this from here on. Raises what `load` raises.
        """
        if self._own or not self._vocab:
            return
        own = load()
        with self._lock:
            before = self._vocab
            self._own, self._vocab = own, self._llama.model_get_vocab(own)
            self._wait_for_holders(before)

    def __del__(self) -> None:
        if getattr(self, "_own", 0) and not sys.is_finalizing():
            orphans.leave(self._llama.model_free, self._own)

    def close(self) -> None:
        """Before the model is freed for good. Idempotent."""
        with self._lock:
            before = self._vocab
            own, self._own, self._vocab = self._own, 0, 0
            self._wait_for_holders(before)
            if own:
                self._llama.model_free(own)

    @contextmanager
    def held(self) -> Iterator[int]:
        """Its address, which is good inside, and may be another one the next time.

        For calls that take long: others go on meanwhile. Raises ModelError once it is closed.
        """
        with self._lock:
            vocab = self._require_open()
            self._holders[vocab] += 1
        try:
            yield vocab
        finally:
            with self._left:
                self._holders[vocab] -= 1
                self._left.notify_all()

    @cached_property
    def probes(self) -> tuple[str, ...]:
        """Texts of tokens by which an ambiguous grammar is found out: those that repeat themselves,
        and the longest of other kinds."""
        periodic: set[str] = set()
        longest: dict[tuple[bool, bool, bool], list[str]] = {}
        for token in range(self.size):
            text = self.piece(token, False).decode("utf-8", "ignore")
            if len(text) < _SHORTEST_PROBE:
                continue
            if any(text == (text[:n] * len(text))[: len(text)] for n in (1, 2, 3)):
                periodic.add(text)
            kind = (text.isascii(), text.strip().isalnum(), text[:1].isspace())
            longest.setdefault(kind, []).append(text)
        for texts in longest.values():
            periodic.update(sorted(texts, key=len)[-_PROBES_OF_A_KIND:])
        return tuple(sorted(periodic))

    def _wait_for_holders(self, vocab: int) -> None:
        self._left.wait_for(lambda: not self._holders[vocab])

    @cached_property
    def eog(self) -> tuple[int, ...]:
        """All tokens with which generation ends."""
        with self.held() as vocab:
            ends = self._llama.vocab_is_eog
            return tuple(token for token in range(self.size) if ends(vocab, token))

    def tokenize(self, text: str, add_special: bool, parse_special: bool) -> list[int]:
        """See `Model.tokenize`."""
        self._require_texts()
        data = text.encode("utf-8", "replace")
        count = len(data) + 8
        while True:
            tokens = (ctypes.c_int32 * count)()
            # a long text takes a second a megabyte, and whoever generates needs the pieces
            with self.held() as vocab:
                found: int = self._llama.tokenize(
                    vocab, data, len(data), tokens, count, add_special, parse_special
                )
            if found >= 0:
                return tokens[:found]
            if -found <= count:
                raise ModelError(f"{self._path}: cannot tokenize a text of {len(data)} bytes")
            count = -found

    def piece(self, token: int, special: bool) -> bytes:
        """See `Model.piece`."""
        self._require_texts()
        self._check(token)
        size = 64
        while True:
            text = ctypes.create_string_buffer(size)
            with self._lock:
                vocab = self._require_open()
                found: int = self._llama.token_to_piece(vocab, token, text, size, 0, special)
            if found >= 0:
                return text.raw[:found]
            size = -found

    def is_eog(self, token: int) -> bool:
        """See `Model.is_eog`."""
        self._check(token)
        with self._lock:
            return bool(self._llama.vocab_is_eog(self._require_open(), token))

    def _require_texts(self) -> None:
        if not self.has_texts:
            # the engine would end the process
            raise ModelError(f"{self._path}: the model has no vocabulary")

    def _check(self, token: int) -> None:
        if not 0 <= token < self.size:
            # the engine would end the process
            raise UsageError(f"token {token} is not in the vocabulary of {self.size}")

    def _require_open(self) -> int:
        if not self._vocab:
            raise ModelError(f"{self._path}: the model is closed")
        return self._vocab
