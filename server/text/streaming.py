"""Text of a turn while it is written: from new tokens to the content and reasoning they add."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Sequence

logger = logging.getLogger(__name__)

StreamParser = Callable[[str, Sequence[int]], tuple[str, str]]
"""Maps more text of a turn, with its tokens, to what it adds to content and reasoning, without calls."""


class TurnStream:
    """Splits a turn with a parser; without one, all of it is content. If the parser fails, which may
    happen on any text, the stream yields nothing more. The complete turn is parsed again anyway."""

    def __init__(
        self,
        decode: Callable[[Iterable[int]], str],
        parse: StreamParser = lambda text, token_ids: (text, ""),
        special: Collection[int] = (),
        end: Collection[int] = (),
    ) -> None:
        """With a parser, `decode` keeps special tokens. Tokens of `special` leave no text, and those of
        `end` are not parsed."""
        self._decode = decode
        self._text = TextStream(decode)
        self._parse: StreamParser | None = parse
        self._special = special
        self._end = end
        self._control: set[str] = set()

    def add(self, token_ids: Sequence[int]) -> tuple[str, str]:
        """Returns what these tokens add to the content and to the reasoning."""
        if self._parse is None:
            return "", ""
        known = [token for token in token_ids if token not in self._end]
        self._control |= {self._decode([token]) for token in known if token in self._special}
        try:
            content, reasoning = self._parse(self._text.add(known), known)
        except Exception:
            logger.warning("parser failed; no longer streaming this turn", exc_info=True)
            self._parse = None
            return "", ""
        for control in self._control:
            content, reasoning = content.replace(control, ""), reasoning.replace(control, "")
        return content, reasoning


class TextStream:
    """Decodes tokens as they arrive, without incomplete characters."""

    def __init__(self, decode: Callable[[Iterable[int]], str]) -> None:
        self._decode = decode
        self._tokens: list[int] = []
        # The text of the tokens before `_read` was returned. Those from `_begin` on are decoded together
        # with what follows, because a decoder joins a token to the previous one.
        self._begin = self._read = 0

    def add(self, token_ids: Sequence[int]) -> str:
        self._tokens += token_ids
        before = self._decode(self._tokens[self._begin : self._read])
        text = self._decode(self._tokens[self._begin :])
        if text.endswith("\ufffd"):  # What a decoder returns for an incomplete character.
            return ""
        self._begin, self._read = self._read, len(self._tokens)
        return text[len(before) :]
