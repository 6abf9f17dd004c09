"""Text of a turn while it is written: tokens as they come -> what they add to content and reasoning."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Protocol

logger = logging.getLogger(__name__)

# What a decoder puts where the rest of a character is still to come.
_HALF = "\ufffd"

StreamParser = Callable[[str, Sequence[int]], tuple[str, str]]
"""What more text of a turn, and the same as tokens, adds to content and reasoning; calls are in neither."""


class TurnStream(Protocol):
    """Reads one turn while it is written."""

    def add(self, token_ids: Sequence[int]) -> tuple[str, str]:
        """What more tokens of the turn add to its content and to its reasoning."""
        ...


class PlainStream:
    """All of a turn is content."""

    def __init__(self, decode: Callable[[Iterable[int]], str]) -> None:
        self._text = TextStream(decode)

    def add(self, token_ids: Sequence[int]) -> tuple[str, str]:
        """See TurnStream."""
        return self._text.add(token_ids), ""


class ParsedStream:
    """A turn as a parser takes it apart.

    Where the parser fails, which they may at any text, no more is read: a turn is read once more when it is
    whole.
    """

    def __init__(
        self,
        decode: Callable[[Iterable[int]], str],
        parse: StreamParser,
        special: Collection[int],
        end: Collection[int],
    ) -> None:
        """`decode` keeps special tokens; those of `special` that come leave no text, and those of `end` are
        not parsed."""
        self._decode = decode
        self._text = TextStream(decode)
        self._parse: StreamParser | None = parse
        self._special = special
        self._end = end
        self._control: set[str] = set()

    def add(self, token_ids: Sequence[int]) -> tuple[str, str]:
        """See TurnStream."""
        if self._parse is None:
            return "", ""
        known = [token for token in token_ids if token not in self._end]
        self._control |= {self._decode([token]) for token in known if token in self._special}
        try:
            content, reasoning = self._parse(self._text.add(known), known)
        except Exception:
            logger.warning("a turn is not read as it is written any more", exc_info=True)
            self._parse = None
            return "", ""
        for control in self._control:
            content, reasoning = content.replace(control, ""), reasoning.replace(control, "")
        return content, reasoning


class TextStream:
    """Text of tokens as they come, without half characters."""

    def __init__(self, decode: Callable[[Iterable[int]], str]) -> None:
        self._decode = decode
        self._tokens: list[int] = []
        # What was given out is the text of the tokens before `_read`; those from `_begin` on are decoded
        # with what follows, because a decoder joins a token to the one before it.
        self._begin = self._read = 0

    def add(self, token_ids: Sequence[int]) -> str:
        """What these tokens add to the text."""
        self._tokens += token_ids
        before = self._decode(self._tokens[self._begin : self._read])
        text = self._decode(self._tokens[self._begin :])
        if text.endswith(_HALF):
            return ""
        self._begin, self._read = self._read, len(self._tokens)
        return text[len(before) :]
