"""Runs external processes as the worker's functions: `generate` runs one process to its end, and
`reward` scores what it left behind.

An attempt proceeds in this order, and nothing of it remains however it ends:

1. Make a folder for the attempt with `task.json` and what `files` names.
2. Open its paths at the relay and make its cgroup.
3. The keeper starts the command (`running`). In a sandbox it passes the listening sockets out.
4. The command ends, its time limit expires, or the attempt is cancelled (lease lost, worker
   stopped). In every case the process tree is ended before the next step.
5. Close its paths at the relay, which ends its requests in flight. Closing the attempt aborts a
   turn that is still in flight (`Trajectory.driven_elsewhere`).
6. Read its turns from the server, and its result file.
7. Compute the reward, then remove the folder unless it is kept.

Meanwhile the worker renews the attempt's lease like any other. If the worker is killed, the keepers
end the trees and remove the folders, and the server leases the attempts again.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import shutil
import stat
import tempfile
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.client.calls import Calls
from penstock.client.external.cgroups import Cgroup, Cgroups, find_cgroups
from penstock.client.external.environment import (
    RESULT_FILE,
    TASK_FILE,
    Access,
    process_environment,
    task_json,
)
from penstock.client.external.relay import Admitted, Relay
from penstock.client.external.result import (
    ProcessMemory,
    ProcessNotStarted,
    ProcessTimeout,
    ProcessTookNoTurn,
    ResultInvalid,
    check_ended_well,
    failure_in,
    outcome_in,
    read_result,
    reward_of_status,
    with_output,
)
from penstock.client.external.running import Running
from penstock.client.external.sandbox import Sandbox, SandboxMissing, find_sandbox
from penstock.client.external.settings import (
    EXIT_STATUS,
    CommandSettings,
    Keep,
    Network,
    SandboxUse,
)
from penstock.client.outcome import Failed, ProcessRecord
from penstock.client.scoring import Agent, RewardInvalid, as_outcome, as_outcomes, call
from penstock.wire.security import Security

if TYPE_CHECKING:
    from penstock.client.external.keeper import Order
    from penstock.client.outcome import Outcome
    from penstock.client.tasks import Task
    from penstock.client.trajectory import Trajectory

logger = logging.getLogger("penstock.rollout")

OUTPUT_FILE = "output.log"
# Ports in an attempt's own network.
_HTTP_PORT = 8000
_GRPC_PORT = 50051
_START_SECONDS = 60.0


class CommandUnusable(Exception):
    """The processes cannot be run as configured; the message explains why."""


class ExternalProcesses:
    """Runs processes for one worker. Call `open` before the first attempt and `close` after the last."""

    def __init__(
        self,
        calls: Calls,
        security: Security,
        settings: CommandSettings,
        reward: Agent | None,
    ) -> None:
        """`reward` is the function that scores; None if the process itself reports the reward."""
        self._calls = calls
        self._security = security
        self._settings = settings
        self._scores = reward
        self._relay = Relay(calls, security)
        self._sandbox: Sandbox | None = None
        self._cgroups: Cgroups | None = None
        self._model = ""
        self._root: Path | None = None
        self._unlocked = ""
        """Why there is no sandbox."""

    async def open(self) -> None:
        """Checks what the server and the machine offer. Waits for the server without a limit.

        Raises CommandUnusable.
        """
        info = await self._calls.get_server_info(wait_for_ready=True)
        self._model = info.model
        if self._settings.api.http and not info.http_port:
            raise CommandUnusable(
                f"the server at {self._calls.address} serves no HTTP (its http_port is 0): start it with "
                "--http-listen HOST:PORT, or give --api grpc if the command uses only gRPC"
            )
        self._root = await asyncio.to_thread(self._make_root)
        self._sandbox = await asyncio.to_thread(self._find_sandbox, self._root)
        if self._settings.memory_limit_bytes:
            self._cgroups = await asyncio.to_thread(find_cgroups)
        if self._settings.api.http:
            await self._relay.open(info.http_port)
        # Each process needs a few of the worker's descriptors.
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        logger.info("%s", self._described())

    async def close(self) -> None:
        """Stops serving and removes the folder that `open` made."""
        await self._relay.close()
        if self._root is None or self._settings.folder is not None:
            return
        if self._settings.keep is Keep.NONE:
            await asyncio.to_thread(remove_folder, self._root)
        else:
            with suppress(OSError):
                self._root.rmdir()

    async def generate(self, task: Task, trajectory: Trajectory) -> Outcome | Failed | None:
        """Returns None if a function scores the attempt. Raises AttemptFailed."""
        trajectory.driven_elsewhere = True
        making = asyncio.ensure_future(asyncio.to_thread(self._make_folder, task))
        try:
            folder = await asyncio.shield(making)
        except asyncio.CancelledError:
            # The thread cannot be stopped, so wait for the folder and remove it.
            await self._let_go(await making, failed=True)
            raise
        try:
            record = await self._run(trajectory, folder)
            trajectory.process = record
            outcome = await self._judge(record, trajectory)
        except BaseException:
            await self._let_go(folder, failed=True)
            raise
        if outcome is None:
            # Keep the folder until the attempt is scored. If a sibling is lost, it never is.
            if self._settings.keep is Keep.NONE:
                weakref.finalize(trajectory, remove_folder, folder)
            return None
        await self._let_go(folder, failed=isinstance(outcome, Failed))
        return outcome

    async def reward(self, task: Task, trajectory: Trajectory | Sequence[Trajectory]) -> object:
        assert self._scores is not None
        scored = [trajectory] if not isinstance(trajectory, Sequence) else trajectory
        failed = [True] * len(scored)
        try:
            score = await call(self._scores, task, trajectory)
            with suppress(RewardInvalid):
                together = isinstance(trajectory, Sequence)
                outcomes = as_outcomes(score, len(scored)) if together else [as_outcome(score)]
                failed = [isinstance(outcome, Failed) for outcome in outcomes]
        finally:
            for one, has_failed in zip(scored, failed, strict=True):
                if one.process is not None:
                    await self._let_go(one.process.folder, failed=has_failed)
        return score

    async def _run(self, trajectory: Trajectory, folder: Path) -> ProcessRecord:
        """Raises ProcessTimeout, ProcessMemory, ProcessNotStarted, ResultInvalid."""
        cgroup = self._make_cgroup()
        admitted = self._relay.admit(trajectory.trajectory_id)
        try:
            running = self._start(trajectory, folder, admitted, cgroup)
            return await self._finish(running, admitted, folder, cgroup)
        finally:
            await self._relay.dismiss(admitted)
            if cgroup is not None:
                cgroup.remove()

    async def _finish(
        self, running: Running, admitted: Admitted, folder: Path, cgroup: Cgroup | None
    ) -> ProcessRecord:
        settings, timed_out, began = self._settings, False, False
        try:
            async with asyncio.timeout(_START_SECONDS):
                began = await self._attach(running, admitted)
            async with asyncio.timeout(settings.time_limit_seconds):
                await running.ended()
        except TimeoutError:
            timed_out = began
        finally:
            report = await asyncio.shield(running.end())
        output = running.output
        if settings.keep is not Keep.NONE:
            await asyncio.to_thread(_write_output, folder / OUTPUT_FILE, output)
        if not began or report is None:
            why = "its keeper was killed" if began else "the command did not start"
            raise ProcessNotStarted(with_output(why, output))
        if timed_out:
            seconds = settings.time_limit_seconds
            raise ProcessTimeout(with_output(f"still running after {seconds:g} s", output))
        if report.status != 0 and cgroup is not None and cgroup.was_out_of_memory():
            limit = settings.memory_limit_bytes / (1 << 20)
            raise ProcessMemory(with_output(f"more than {limit:.0f} MiB of memory", output))
        return ProcessRecord(
            folder, report.status, report.signal, report.seconds, report.peak_bytes, output
        )

    async def _attach(self, running: Running, admitted: Admitted) -> bool:
        """Serves the process's listening sockets. Returns whether the command started."""
        await asyncio.wait([running.listening])
        if running.listening.cancelled():
            return False
        serves = {_HTTP_PORT: self._relay.serve_http, _GRPC_PORT: self._relay.serve_grpc}
        for port, listener in zip(self._inner_ports(), running.listening.result(), strict=True):
            await serves[port](admitted, listener)
        return True

    def _start(
        self, trajectory: Trajectory, folder: Path, admitted: Admitted, cgroup: Cgroup | None
    ) -> Running:
        settings = self._settings
        environment = process_environment(settings, self._access(admitted), trajectory, folder)
        limit = settings.memory_limit_bytes
        order: Order = {
            "control": -1,
            "command": settings.command,
            "folder": str(folder),
            "sandbox": self._sandbox.command(folder) if self._sandbox else [],
            "listen": self._inner_ports(),
            "cgroups": [str(cgroup.folder)] if cgroup else [],
            "data_bytes": limit if cgroup is None else 0,
            "remove": str(folder) if settings.keep is Keep.NONE else "",
            "root": str(self._root) if settings.folder is None else "",
        }
        try:
            return Running.start(order, environment)
        except OSError as error:
            raise ProcessNotStarted(f"cannot start a process: {error}") from error

    def _inner_ports(self) -> list[int]:
        """Ports in the process's own network namespace that the worker serves."""
        if self._sandbox is None or self._sandbox.share_network:
            return []
        api = self._settings.api
        return [*([_HTTP_PORT] if api.http else []), *([_GRPC_PORT] if api.grpc else [])]

    def _access(self, admitted: Admitted) -> Access:
        inner = self._inner_ports()
        isolated = self._sandbox is not None and not self._sandbox.share_network
        address = f"127.0.0.1:{_GRPC_PORT}" if inner else self._calls.address
        return Access(
            base_url=f"http://127.0.0.1:{_HTTP_PORT if inner else self._relay.port}{admitted.path}"
            if self._settings.api.http
            else "",
            key=admitted.key,
            address=address if self._settings.api.grpc or not isolated else "",
            model=self._model,
        )

    async def _judge(
        self, record: ProcessRecord, trajectory: Trajectory
    ) -> Outcome | Failed | None:
        """Returns None if a function scores the process. Raises AttemptFailed."""
        try:
            result = await asyncio.to_thread(read_result, record.folder / RESULT_FILE)
        except ResultInvalid:
            check_ended_well(record)
            raise
        failed = None if result is None else failure_in(result)
        if failed is not None:
            return failed
        if self._settings.reward != EXIT_STATUS or record.status is None:
            check_ended_well(record)
        outcome = reward_of_status(record) if self._settings.reward == EXIT_STATUS else None
        await trajectory.load()
        if not trajectory.turns:
            raise ProcessTookNoTurn(
                with_output(f"{record.described()}, but took no turn", record.output)
            )
        if outcome is None and self._scores is None:
            outcome = outcome_in(result)
        trajectory.process = replace(record, result=result)
        return outcome

    def _make_cgroup(self) -> Cgroup | None:
        if self._cgroups is None:
            return None
        try:
            return self._cgroups.make(self._settings.memory_limit_bytes)
        except OSError as error:
            raise ProcessNotStarted(f"cannot make a cgroup: {error}") from error

    def _make_root(self) -> Path:
        root = self._settings.folder
        if root is None:
            return Path(tempfile.mkdtemp(prefix="penstock-rollout-"))
        root.mkdir(parents=True, exist_ok=True)
        return root.resolve()

    def _make_folder(self, task: Task) -> Path:
        """Raises ProcessNotStarted."""
        assert self._root is not None
        folder: Path | None = None
        try:
            # A cleaner of temporary files may have removed it during a run of several days.
            self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
            folder = Path(tempfile.mkdtemp(prefix="attempt-", dir=self._root))
            (folder / TASK_FILE).write_text(task_json(task), encoding="utf-8")
            for source in self._settings.files:
                if source.is_dir():
                    shutil.copytree(source, folder / source.name, symlinks=True)
                else:
                    shutil.copy(source, folder / source.name)
        except (OSError, shutil.Error) as error:
            if folder is not None:
                remove_folder(folder)
            raise ProcessNotStarted(f"cannot make its folder: {error}") from error
        return folder

    async def _let_go(self, folder: Path, *, failed: bool) -> None:
        keep = self._settings.keep
        if keep is Keep.NONE or (keep is Keep.FAILED and not failed):
            await asyncio.to_thread(remove_folder, folder)

    def _find_sandbox(self, root: Path) -> Sandbox | None:
        """Raises CommandUnusable if a required sandbox is missing, or if it could not hide attempts."""
        settings, security = self._settings, self._security
        if settings.sandbox is SandboxUse.OFF:
            self._unlocked = "by --sandbox off"
            return None
        secrets = (security.token_file, security.key, settings.token_file)
        shown = (*_own_folder(), *settings.read)
        if root in (path.resolve() for path in shown):
            raise CommandUnusable(
                f"--work-folder {root} is visible to every process, and so would be the attempts "
                "in it: choose a folder inside it, or elsewhere"
            )
        try:
            return find_sandbox(
                root,
                share_network=settings.network is Network.HOST,
                read=shown,
                hidden=[path for path in secrets if path is not None],
            )
        except SandboxMissing as error:
            if settings.sandbox is SandboxUse.REQUIRE:
                raise CommandUnusable(f"--sandbox require: {error}") from error
            self._unlocked = str(error)
            return None

    def _described(self) -> str:
        settings = self._settings
        if self._sandbox is None:
            lock = f"NO SANDBOX ({self._unlocked}): processes can do what this user can"
        elif self._sandbox.share_network:
            lock = "in a sandbox (bubblewrap), with the host's network"
        else:
            lock = "in a sandbox (bubblewrap), with no network except the attempt's own endpoints"
        if not settings.memory_limit_bytes:
            memory = "no memory limit"
        else:
            size = f"{settings.memory_limit_bytes / (1 << 20):.0f} MiB"
            memory = (
                f"{size} for all processes of an attempt (cgroup v{self._cgroups.version})"
                if (self._cgroups)
                else f"{size} for each process (RLIMIT_DATA: cgroups are unavailable here)"
            )
        ends = "the keeper ends every process (subreaper)"
        return f"{lock}; {settings.time_limit_seconds:g} s; {memory}; {ends}"


def _own_folder() -> list[Path]:
    """The folder that the worker was started in, unless it contains the home folder, with its
    secrets, or the folder of temporary files, with the attempts of other workers."""
    here = Path.cwd()
    private = (Path.home(), Path(tempfile.gettempdir()))
    return [] if any(path.resolve().is_relative_to(here) for path in private) else [here]


def _write_output(path: Path, output: str) -> None:
    path.unlink(missing_ok=True)
    path.write_text(output, encoding="utf-8")


def remove_folder(folder: Path) -> None:
    """Removes an attempt's folder, including subfolders that the process made unwritable."""

    def unlock(remove: Callable[..., Any], path: str, _: object) -> None:
        for place in (Path(path).parent, Path(path)):
            with suppress(OSError):
                if not place.is_symlink() and place.is_relative_to(folder):
                    place.chmod(stat.S_IRWXU)
        with suppress(OSError):
            remove(path)

    shutil.rmtree(folder, onerror=unlock)
    if folder.exists():
        shutil.rmtree(folder, ignore_errors=True)
