"""What `penstock rollout` is told about the processes it runs."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", re.IGNORECASE)

EXIT_STATUS = "exit-status"
RESULT_FILE = "result-file"


class SandboxUse(StrEnum):
    """Whether processes are locked in."""

    AUTO = "auto"
    """Where the machine can; the worker says at its start whether it does."""
    REQUIRE = "require"
    """Or the worker does not start."""
    OFF = "off"


class Network(StrEnum):
    """What a process in a sandbox reaches."""

    ATTEMPT = "attempt"
    """What `Api` names, and nothing else."""
    HOST = "host"
    """Whatever the host does."""


class Api(StrEnum):
    """How a process takes its turns."""

    HTTP = "http"
    """The compatible endpoints, of its own attempt alone."""
    GRPC = "grpc"
    """The server's gRPC services, as whoever its token says."""
    BOTH = "both"

    @property
    def http(self) -> bool:
        """Whether it is given a base URL."""
        return self is not Api.GRPC

    @property
    def grpc(self) -> bool:
        """Whether the gRPC services are open to it from within a sandbox."""
        return self is not Api.HTTP


class Keep(StrEnum):
    """Which folders stay when their attempt has ended."""

    NONE = "none"
    FAILED = "failed"
    ALL = "all"


@dataclass(frozen=True)
class CommandSettings:
    """One external process per attempt."""

    command: str
    """For /bin/sh, in a folder of the attempt's own."""
    reward: str | None = None
    """`exit-status`, `result-file`, or a function that is called once the command has ended with status 0;
    None is `result-file`."""
    time_limit_seconds: float = 600.0
    """From the start of the command; then PROCESS_TIMEOUT."""
    memory_limit_bytes: int = 0
    """Of all its processes together where cgroups can be made, else of each; zero is none."""
    sandbox: SandboxUse = SandboxUse.AUTO
    network: Network = Network.ATTEMPT
    api: Api = Api.HTTP
    environment: tuple[str, ...] = ()
    """NAME of a variable of the worker's to pass on, or NAME=VALUE."""
    files: tuple[Path, ...] = ()
    """Files and folders to copy into each attempt's folder."""
    read: tuple[Path, ...] = ()
    """What a sandbox shows beside the system."""
    folder: Path | None = None
    """In which the attempts' folders are made; None is the system's place for temporary files."""
    keep: Keep = Keep.NONE
    token_file: Path | None = None
    """A token for the process's own calls over gRPC."""


def read_size(text: str) -> int:
    """Bytes in a size such as "2GiB", "512M" or "1048576"; units are powers of 1024.

    Raises ValueError, naming what it got.
    """
    match = SIZE.fullmatch(text.strip())
    if match is None or float(match[1]) <= 0:
        raise ValueError(f"a size reads 512M or 2GiB, got {text!r}")
    return int(float(match[1]) * 1024 ** " KMGT".index(match[2].upper() or " "))
