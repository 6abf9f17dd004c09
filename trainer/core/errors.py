"""Errors that stop a training run. `__main__` turns each into one line and an exit code."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

from penstock.common.functions import FunctionInvalid


class TrainerError(Exception):
    """Root of the trainer's own errors. The message addresses the person who started the run."""


class ConfigInvalid(TrainerError):
    """The configuration is unusable. The message names each field and the value it got."""


@contextmanager
def blaming(where: str) -> Generator[None]:
    """Raises ConfigInvalid that begins with `where` if a function of the user cannot be found, or fails:
    its author has to see any exception."""
    try:
        yield
    except FunctionInvalid as error:
        raise ConfigInvalid(f"{where}: {error}") from error
    except Exception as error:
        raise ConfigInvalid(f"{where}: {type(error).__name__}: {error}") from error


class BackendUnusable(ConfigInvalid):
    """The configured backend cannot run here."""


class CheckpointUnusable(TrainerError):
    """A checkpoint is incomplete, or belongs to another model."""


class StorageFailed(TrainerError):
    """Something the run must persist could not be written. Earlier writes are intact."""


@contextmanager
def storing(path: Path) -> Generator[None]:
    """Raises StorageFailed with the system's message if writing to `path` fails."""
    try:
        yield
    except OSError as error:
        raise StorageFailed(f"{path}: {error.strerror or error}") from error


class RunFolderInUse(TrainerError):
    """Another trainer is writing to the run's folder."""


class ServerGone(TrainerError):
    """The server was unreachable for longer than the limit."""


class ServerLost(TrainerError):
    """A call failed because the server is away. The exchange is already reconnecting."""

    def __init__(self, message: str, retry_after_seconds: float = 0.0) -> None:
        """`retry_after_seconds` is the shortest time that the server asked the trainer to wait."""
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class ServerFull(ServerLost):
    """A call failed because a limit of the server is reached. There is nothing to reconnect."""


class SessionRefused(TrainerError):
    """The server refuses this trainer, because another one replaced it or the request is not allowed."""


class WeightsRefused(TrainerError):
    """The server refuses a weight version, and resending it would not help."""


class SwitchRejected(WeightsRefused):
    """The server refused to switch to a staged version, or could not. The message names the version
    it samples."""

    def __init__(self, weight_version: int, active_version: int, reason: str, message: str) -> None:
        super().__init__(
            f"the server refuses to switch to version {weight_version} and stays at "
            f"{active_version}: {reason}: {message}"
        )
        self.weight_version = weight_version
        self.reason = reason
        self.message = message


class EverythingFailed(TrainerError):
    """Every trajectory failed, in too many consecutive groups."""


class EverythingDropped(TrainerError):
    """Too many groups of a step were dropped, and the configuration says to stop then."""


def leaves(error: BaseException) -> Iterator[BaseException]:
    """The errors in a group, and in the groups within it; the first one cancelled the other tasks."""
    if not isinstance(error, BaseExceptionGroup):
        yield error
        return
    for each in cast("BaseExceptionGroup[BaseException]", error).exceptions:
        yield from leaves(each)
