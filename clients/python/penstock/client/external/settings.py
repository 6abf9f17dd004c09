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
    AUTO = "auto"
    REQUIRE = "require"
    OFF = "off"


class Network(StrEnum):
    ATTEMPT = "attempt"
    """Only what `Api` names."""
    HOST = "host"


class Api(StrEnum):
    """How a process takes its turns."""

    HTTP = "http"
    """The OpenAI- and Anthropic-compatible endpoints, limited to the process's own attempt."""
    GRPC = "grpc"
    """The server's gRPC services, with the role of the token given to the process."""
    BOTH = "both"

    @property
    def http(self) -> bool:
        return self is not Api.GRPC

    @property
    def grpc(self) -> bool:
        return self is not Api.HTTP


class Keep(StrEnum):
    NONE = "none"
    FAILED = "failed"
    ALL = "all"


@dataclass(frozen=True)
class CommandSettings:
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
    read: tuple[Path, ...] = ()
    folder: Path | None = None
    """Parent of the attempts' folders. None uses the system's folder of temporary files."""
    keep: Keep = Keep.NONE
    token_file: Path | None = None


def read_size(text: str) -> int:
    """Units are powers of 1024: "2GiB", "512M", "1048576". Raises ValueError."""
    match = SIZE.fullmatch(text.strip())
    if match is None or float(match[1]) <= 0:
        raise ValueError(
            f"a size is a number with an optional unit, such as 512M or 2GiB, got {text!r}"
        )
    return int(float(match[1]) * 1024 ** " KMGT".index(match[2].upper() or " "))
