"""Test certificates and tokens: a trusted authority, a server, callers of every role, and
strangers."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path

import trustme

from penstock.common.token_file import Role, hash_token, new_token
from penstock.wire.security import Security

COMMON_NAMES = {Role.AGENT: "agent-1", Role.TRAINER: "trainer-1", Role.ADMIN: "admin-1"}


@cache
def authority() -> trustme.CA:
    """The authority that server and clients trust. Created once,
    because generating keys is slow."""
    return trustme.CA()


@cache
def stranger() -> trustme.CA:
    """An authority that neither server nor clients trust."""
    return trustme.CA()


@cache
def server_certificate() -> trustme.LeafCert:
    return authority().issue_cert("localhost", "127.0.0.1")


@cache
def client_certificate(name: str, *, trusted: bool = True) -> trustme.LeafCert:
    issuer = authority() if trusted else stranger()
    return issuer.issue_cert(f"{name}@test", common_name=name)


def write_certificate(folder: Path, name: str, certificate: trustme.LeafCert) -> tuple[Path, Path]:
    """Write the certificate chain and the key as PEM files, and return their paths."""
    chain, key = folder / f"{name}.pem", folder / f"{name}-key.pem"
    chain.write_bytes(b"".join(blob.bytes() for blob in certificate.cert_chain_pems))
    key.write_bytes(certificate.private_key_pem.bytes())
    return chain, key


@dataclass
class Authorities:
    """One folder with the certificates and tokens of a server and its callers."""

    folder: Path
    tokens: dict[str, str]
    """Name to token: one token per role, named after the role, plus "expired" (an agent's)."""

    @property
    def ca(self) -> Path:
        return self.folder / "ca.pem"

    @property
    def token_file(self) -> Path:
        """The file that the server reads its tokens from."""
        return self.folder / "tokens.toml"

    def settings(self, *, mutual: bool = False, tls: bool = True) -> list[str]:
        """The `--set` options for a server that uses these files."""
        found = [f"security.tokens={self.token_file}"]
        if tls:
            found += [
                f"security.certificate={self.folder / 'server.pem'}",
                f"security.key={self.folder / 'server-key.pem'}",
            ]
        return [*found, f"security.client_ca={self.ca}"] if mutual else found

    def security(self, name: str | None, certificate: str | None = None) -> Security:
        """Client security with the token and certificate of these names, or without them."""
        pair = (None, None)
        if certificate is not None:
            pair = (self.folder / f"{certificate}.pem", self.folder / f"{certificate}-key.pem")
        return Security(
            ca=self.ca,
            token=self.tokens[name] if name else "",
            certificate=pair[0],
            key=pair[1],
        )

    def write_tokens(self, **changes: dict[str, object] | None) -> None:
        """Write the token file. `changes` replaces entries by name; None removes one."""
        now = datetime.now(UTC)
        entries: dict[str, dict[str, object] | None] = {
            name: {
                "role": "agent" if name == "expired" else name,
                "sha256": hash_token(token).hex(),
                "expires": now + timedelta(hours=-1 if name == "expired" else 1),
            }
            for name, token in self.tokens.items()
        }
        entries |= changes
        lines: list[str] = []
        for name, entry in entries.items():
            if entry is not None:
                lines += [
                    f'[tokens."{name}"]',
                    f'role = "{entry["role"]}"',
                    f'sha256 = "{entry["sha256"]}"',
                    f"expires = {entry['expires']}",
                ]
        lines.append("[certificates]")
        lines += [f'{name} = "{role}"' for role, name in COMMON_NAMES.items()]
        new = self.folder / "tokens.new"
        new.write_text("\n".join(lines) + "\n")
        new.replace(self.token_file)


def make_authorities(folder: Path) -> Authorities:
    """Create the folder with every certificate and the token file."""
    folder.mkdir(exist_ok=True)
    (folder / "ca.pem").write_bytes(authority().cert_pem.bytes())
    write_certificate(folder, "server", server_certificate())
    for name in (*COMMON_NAMES.values(), "nobody"):
        write_certificate(folder, name, client_certificate(name))
    write_certificate(folder, "stranger", client_certificate("agent-1", trusted=False))
    made = Authorities(folder, {name: new_token() for name in (*Role, "expired")})
    made.write_tokens()
    return made
