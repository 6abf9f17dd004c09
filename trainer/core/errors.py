"""What stops a training run; `__main__` turns each into one line and an exit code."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path


class TrainerError(Exception):
    """Root of the trainer's own errors; the message is for the person who started the run."""


class ConfigInvalid(TrainerError):
    """The configuration cannot be used; the message names each field and the value it got."""


class BackendUnusable(ConfigInvalid):
    """The backend that the configuration names cannot run here."""


class CheckpointUnusable(TrainerError):
    """A checkpoint is incomplete, or does not belong to this model."""


class StorageFailed(TrainerError):
    """What the run has to remember cannot be written; what was written before is whole."""


@contextmanager
def storing(path: Path) -> Generator[None]:
    """While something is written there: what the system says of it is raised as StorageFailed."""
    try:
        yield
    except OSError as error:
        raise StorageFailed(f"{path}: {error.strerror or error}") from error


class RunFolderInUse(TrainerError):
    """Another trainer writes to the run's folder."""


class ServerGone(TrainerError):
    """The server could not be reached for longer than the bound allows."""


class ServerLost(TrainerError):
    """A call failed because the server is away for now; the exchange is already reconnecting."""

    retry_after_seconds = 0.0
    """What the server asked to be waited for at least."""


class ServerFull(ServerLost):
    """A call failed because a bound of the server's is reached for now; there is nothing to reconnect."""

    def __init__(self, message: str, retry_after_seconds: float) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class SessionRefused(TrainerError):
    """The server refuses this trainer: another one took its place, or the request is not
    allowed."""


class WeightsRefused(TrainerError):
    """The server refuses a weight version, and sending it again would not help."""


class SwitchRejected(WeightsRefused):
    """The server refuses to switch to a staged version, or could not; says what it samples."""

    def __init__(self, weight_version: int, active_version: int, reason: str, message: str) -> None:
        super().__init__(
            f"the server refuses to switch to version {weight_version} and stays at "
            f"{active_version}: {reason}: {message}"
        )
        self.weight_version = weight_version
        self.reason = reason
        self.message = message


class EverythingFailed(TrainerError):
    """Every trajectory of too many groups in a row failed."""


class EverythingDropped(TrainerError):
    """Too many groups of a step were of no use, and the run is to stop then."""
