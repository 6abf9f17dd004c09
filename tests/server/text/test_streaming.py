"""Turns parsed while they are written: whole characters, no control tokens, and parser
failures that do not end a turn."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest

from penstock.server.http.reply import _Sent  # pyright: ignore[reportPrivateUsage]
from penstock.server.text.streaming import TextStream, TurnStream
from tests.support.fakes import decode_bytes

MARK, END = 256, 257


def decode(token_ids: Iterable[int]) -> str:
    text = bytearray()
    for token in token_ids:
        text += b"<mark>" if token == MARK else bytes([token]) if token < 256 else b""
    return text.decode(errors="replace")


@pytest.mark.parametrize("step", [1, 2, 3, 7])
def test_characters_come_whole(step: int) -> None:
    text = "naïve 🙂 日本語 text"
    tokens = list(text.encode())
    stream = TextStream(decode_bytes)
    pieces = [stream.add(tokens[at : at + step]) for at in range(0, len(tokens), step)]
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)
    assert TurnStream(decode_bytes).add(tokens) == (text, "")


def test_control_tokens_leave_no_text_and_the_end_is_not_parsed() -> None:
    seen: list[int] = []

    def parse(text: str, token_ids: Sequence[int]) -> tuple[str, str]:
        seen.extend(token_ids)
        return text, text.upper()

    stream = TurnStream(decode, parse, {MARK, END}, {END})
    # The same text in ordinary tokens is the policy's own.
    assert stream.add(list(b"<mark>")) == ("<mark>", "<MARK>")
    assert stream.add([*b"ab", MARK, *b"c", END]) == ("abc", "AB<MARK>C")
    assert END not in seen and MARK in seen


def test_a_parser_that_fails_ends_the_reading_and_not_the_turn() -> None:
    def parse(text: str, token_ids: Sequence[int]) -> tuple[str, str]:
        if "!" in text:
            raise KeyError(text)
        return text, ""

    stream = TurnStream(decode, parse, (), ())
    assert [stream.add(list(piece)) for piece in (b"one", b"!", b"two")] == [
        ("one", ""),
        ("", ""),
        ("", ""),
    ]


def test_what_may_become_a_stop_string_is_held_back() -> None:
    sent = _Sent(3, ("STOP",))
    assert [sent.add(piece) for piece in ("abcS", "TO", "x yzST", "OP more")] == [
        "a",
        "bc",
        "STOx y",
        "z",
    ]
    assert sent.rest("abcSTOx yz") == ""


@pytest.mark.parametrize(
    ("streamed", "whole", "rest"),
    [
        ("", "all", "all"),
        ("al", "all", "l"),
        ("\nal", "all of it", "l of it"),
        ("all ", "all", ""),
        ("other", "all", ""),
    ],
)
def test_what_is_left_at_the_end_comes_then(streamed: str, whole: str, rest: str) -> None:
    sent = _Sent(0, ())
    sent.add(streamed)
    assert sent.rest(whole) == rest
