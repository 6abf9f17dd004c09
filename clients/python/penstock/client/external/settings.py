"""Settings of `penstock rollout` for external processes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", re.IGNORECASE)

EXIT_STATUS = "exit-status"
RESULT_FILE = "result-file"


class SandboxUse(StrEnum):
    """Whether processes run in a sandbox."""

    AUTO = "auto"
    """Use a sandbox if the machine supports it. The worker logs the result at startup."""
    REQUIRE = "require"
    """Refuse to start without a sandbox."""
    OFF = "off"


class Network(StrEnum):
    """What a process in a sandbox can reach."""

    ATTEMPT = "attempt"
    """Only what `Api` names."""
    HOST = "host"
    """Everything that the host can reach."""


class Api(StrEnum):
    """How a process takes its turns."""

    HTTP = "http"
    """The OpenAI- and Anthropic-compatible endpoints, limited to the process's own attempt."""
    GRPC = "grpc"
    """The server's gRPC services, with the role of the token given to the process."""
    BOTH = "both"

    @property
    def http(self) -> bool:
        """Whether the process receives a base URL."""
        return self is not Api.GRPC

    @property
    def grpc(self) -> bool:
        """Whether a sandboxed process can reach the gRPC services."""
        return self is not Api.HTTP


class Keep(StrEnum):
    """Which folders are kept when their attempt has ended."""

    NONE = "none"
    FAILED = "failed"
    ALL = "all"


@dataclass(frozen=True)
class CommandSettings:
    """Settings for one external process per attempt."""

    command: str
    """Command line for /bin/sh, run in the attempt's own folder."""
    reward: str | None = None
    """`exit-status`, `result-file`, or a function called once the command has ended with status 0.
    None means `result-file`."""
    time_limit_seconds: float = 600.0
    """Limit from the start of the command. Beyond it the attempt fails with PROCESS_TIMEOUT."""
    memory_limit_bytes: int = 0
    """Limit for all processes of an attempt together if cgroups are available, else for each
    process. Zero means no limit."""
    sandbox: SandboxUse = SandboxUse.AUTO
    network: Network = Network.ATTEMPT
    api: Api = Api.HTTP
    environment: tuple[str, ...] = ()
    """NAME passes on the worker's variable; NAME=VALUE sets one."""
    files: tuple[Path, ...] = ()
    """Files and folders to copy into each attempt's folder."""
    read: tuple[Path, ...] = ()
    """Paths that a sandbox shows in addition to the system's folders."""
    folder: Path | None = None
    """Parent of the attempts' folders. None uses the system's folder of temporary files."""
    keep: Keep = Keep.NONE
    token_file: Path | None = None
    """Token for the process's own gRPC calls."""


def read_size(text: str) -> int:
    """Returns the bytes in a size such as "2GiB", "512M" or "1048576". Units are powers of 1024.

    Raises ValueError with the text it got.
    """
    match = SIZE.fullmatch(text.strip())
    if match is None or float(match[1]) <= 0:
        raise ValueError(
            f"a size is a number with an optional unit, such as 512M or 2GiB, got {text!r}"
        )
    return int(float(match[1]) * 1024 ** " KMGT".index(match[2].upper() or " "))
