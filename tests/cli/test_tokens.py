"""The token file, and the `penstock token` commands that write it."""

from __future__ import annotations

import stat
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from penstock.cli.__main__ import main
from penstock.common.token_file import (
    Role,
    TokenFileInvalid,
    hash_token,
    new_token,
    parse_token_file,
    redact,
)

# The token file


def entry(**changes: str) -> str:
    fields = {"role": '"agent"', "sha256": f'"{"ab" * 32}"', "expires": "2030-01-01T00:00:00Z"}
    fields |= changes
    lines = [f"{key} = {value}" for key, value in fields.items() if value]
    return "\n".join(["[tokens.one]", *lines, ""])


def test_the_file_of_tokens_says_names_roles_and_ends():
    found = parse_token_file(entry() + '\n[certificates]\n"trainer-1" = "trainer"\n')
    assert [(e.name, e.role, e.sha256) for e in found.tokens] == [
        ("one", Role.AGENT, bytes.fromhex("ab" * 32))
    ]
    assert found.tokens[0].expires == datetime(2030, 1, 1, tzinfo=UTC)
    assert found.certificates == {"trainer-1": Role.TRAINER}
    assert parse_token_file("").tokens == ()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x = = 1", "not TOML"),
        ("[tokens]\none = 1", "tokens.one is not a table"),
        ("tokens = 3", "tokens is not a table"),
        ("[other]", "tables other than"),
        (entry(role='"root"'), "tokens.one.role is not one of agent, trainer, admin"),
        (entry(role="[1]"), "tokens.one.role is not one of"),
        (entry(sha256='"SECRET"'), "tokens.one.sha256 is not 64"),
        (entry(sha256="3"), "tokens.one.sha256 is not 64"),
        (entry(expires='"tomorrow"'), "tokens.one.expires is not a time"),
        (entry(expires="2030-01-01T00:00:00"), "tokens.one.expires is not a time"),
        (entry(expires=""), "needs role, sha256 and expires"),
        (entry() + '\ntoken = "SECRET"', "nothing else"),
        (entry() + entry().replace("one", "two"), "same sha256"),
        (entry().replace("one", '"a b"'), "the name of token 1"),
        ('[certificates]\nx = "SECRET"', "certificates.x is not one of"),
    ],
)
def test_a_file_that_means_nothing_is_refused_without_its_secrets(text: str, said: str):
    with pytest.raises(TokenFileInvalid, match=said) as caught:
        parse_token_file(text)
    assert "SECRET" not in str(caught.value)


def test_a_token_is_recognised_wherever_it_was_written():
    token = new_token()
    assert token not in redact(f"got {token!r}, {token}")
    assert redact("penstock_server, penstock") == "penstock_server, penstock"
    assert len({new_token() for _ in range(100)}) == 100


# `penstock token`


def token(*arguments: str) -> Any:
    return CliRunner().invoke(main, ["token", *arguments])


def test_tokens_are_made_listed_and_revoked(tmp_path: Path):
    file = tmp_path / "tokens.toml"
    made = token(
        "create", "--file", str(file), "--name", "a-1", "--role", "agent", "--expires", "2h"
    )
    assert made.exit_code == 0, made.output
    text = made.stdout.strip()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert text not in file.read_text() and text not in made.stderr
    found = parse_token_file(file.read_text()).tokens[0]
    assert (found.name, found.role, found.sha256) == ("a-1", Role.AGENT, hash_token(text))
    assert timedelta(minutes=119) < found.expires - datetime.now(UTC) <= timedelta(hours=2)

    again = token("create", "--file", str(file), "--name", "a-1", "--role", "admin")
    assert again.exit_code == 1 and "has a token a-1" in again.output
    for wrong in (("--name", "a b"), ("--expires", "soon"), ("--expires", "0d")):
        options = {"--name": "b", "--expires": "1d"} | dict([wrong])
        given = [part for pair in options.items() for part in pair]
        shown = token("create", "--file", str(file), "--role", "agent", *given)
        assert shown.exit_code == 2, shown.output

    # Hand-written entries survive.
    file.write_text(file.read_text() + '\n[certificates]\ntrainer-1 = "trainer"\n')
    file.chmod(0o640)
    token("create", "--file", str(file), "--name", "t", "--role", "trainer")
    assert stat.S_IMODE(file.stat().st_mode) == 0o640
    listed = token("list", "--file", str(file))
    assert [line.split()[:3] for line in listed.stdout.splitlines()] == [
        ["token", "a-1", "agent"],
        ["token", "t", "trainer"],
        ["certificate", "trainer-1", "trainer"],
    ]
    assert token("revoke", "--file", str(file), "--name", "a-1").exit_code == 0
    assert token("revoke", "--file", str(file), "--name", "a-1").exit_code == 1
    left = parse_token_file(file.read_text())
    assert [e.name for e in left.tokens] == ["t"] and left.certificates
    assert token("list", "--file", str(tmp_path / "none")).exit_code == 1


def test_tokens_made_at_the_same_time_are_all_kept(tmp_path: Path):
    from penstock.cli.tokens import create

    file = tmp_path / "tokens.toml"
    threads = [
        threading.Thread(target=create, args=(file, f"t{i}", "agent", "1d")) for i in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(parse_token_file(file.read_text()).tokens) == 8
    assert [path.name for path in tmp_path.iterdir()] == ["tokens.toml"]
