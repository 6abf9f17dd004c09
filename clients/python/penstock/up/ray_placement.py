"""Runs processes on the nodes of a Ray cluster, each in its own actor. The only module that imports Ray.

Order: connect, or start a cluster on this machine -> create one placement group with a bundle for each
process, and wait until the cluster has room for all -> for each start, one actor in the process's bundle.
The actor (`keeper`) starts the ordinary command as its child. At the end, every actor is killed, the group
is removed, and a cluster that was started here is shut down.

    the process ends            its exit status is reported, and its actor ends
    the actor is killed         the kernel kills the process too; it counts as ended by SIGKILL
    a node is lost              its actors are lost with it; Ray moves their bundles to another node once
                                there is one, and each restart waits for that
    this process is killed      Ray ends the actors of a dead driver; a cluster started here ends too
    a rank's process ends       the other ranks end on their own (`trainer.ranks`), or are killed after a
                                while

Ray restarts nothing. The supervisor does, because it counts restarts.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import importlib.util
import logging
import math
import os
import re
import signal
import socket
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping, Sequence, Set
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from penstock.common.answers import ending
from penstock.common.parent_death import PR_SET_CHILD_SUBREAPER, die_with, prctl
from penstock.up.cluster_config import Cluster, Share
from penstock.up.keeper import Keeper
from penstock.up.placement import PlacementFailed
from penstock.up.processes import THIS_HOST, Command, Running, going_on, halt, log_writer
from penstock.up.ranked_process import RankedProcess, rank_environments, rank_name

STORE_BYTES = 80 << 20
"""Object store of a cluster that is started here: only log lines pass through it."""
REACH_SECONDS = 10.0
WHY = re.compile(r"The actor (?:is dead|died) because [^.]*\.")

Result = TypeVar("Result")
OnLine = Callable[[str], None]


def is_installed() -> bool:
    return importlib.util.find_spec("ray") is not None


def _ray() -> Any:
    # Ray's types do not pass pyright, and it is imported only when needed.
    return importlib.import_module("ray")


class RayKeeper(Keeper):
    """A keeper in an actor. Its parent process is the raylet of its node."""

    def __init__(self, folder: str) -> None:
        """Like `Keeper`. Raises FolderMissing."""
        super().__init__(folder)
        # Without this, an actor and its process sometimes outlived its raylet by 20 s.
        die_with(os.getppid())

    async def address(self) -> str:
        """The IP address of its node."""
        return str(_ray().util.get_node_ip_address())


@contextlib.asynccontextmanager
async def open_ray(
    cluster: Cluster, shares: Mapping[str, Share], run: str
) -> AsyncGenerator[RayPlacement]:
    """Opens a placement with room for every process. At the end, no process is left, and nothing of Ray
    that was started here.

    Raises PlacementFailed if the cluster cannot be reached or has no room.
    """
    before = adopt_orphans() if cluster.address is None else None
    # Another run on this cluster may have the name, and actors of one that was killed may still be there.
    label = f"penstock-{run}-{uuid.uuid4().hex[:8]}"
    try:
        await _finish(asyncio.to_thread(_connect, cluster, shares, label))
        async with _group(cluster, shares, label) as group:
            placement = RayPlacement(cluster, shares, group)
            try:
                yield placement
            finally:
                await placement.close()
    finally:
        try:
            await _finish(asyncio.to_thread(_ray().shutdown))
        finally:
            if before is not None:
                # Ray's agents would take a while to notice that they are alone.
                end_all_but(before)


def adopt_orphans() -> set[int]:
    """Makes every process that is orphaned below this one its child. Returns the children so far.

    Ray leaves some processes behind when it ends.
    """
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    return _children()


def end_all_but(before: Set[int]) -> None:
    """Kills the other children, and theirs, which become children meanwhile. Blocks until all are gone."""
    while left := _children() - before:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)


def _children() -> set[int]:
    """`/proc` lists the children of a process by its threads."""
    found: set[int] = set()
    for listed in Path("/proc/self/task").glob("*/children"):
        # A thread may end meanwhile.
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            found |= {int(pid) for pid in listed.read_text().split()}
    return found


def _connect(cluster: Cluster, shares: Mapping[str, Share], label: str) -> None:
    ray = _ray()
    # Hide Ray's own notices from the console, such as that this thread sets no signal handlers.
    logging.getLogger("ray").setLevel(logging.ERROR)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    how: dict[str, Any] = {"namespace": label, "log_to_driver": False}
    how["configure_logging"] = False
    if cluster.address is None:
        total = _total([_bundle(share) for share in shares.values()])
        how |= {"address": "local", "_node_ip_address": THIS_HOST, "include_dashboard": False}
        how |= {"num_cpus": total.pop("CPU"), "object_store_memory": STORE_BYTES}
        # By default Ray lowers the priority of its workers, and so of their children.
        how["_system_config"] = {"worker_niceness": 0}
        total.pop("GPU", None)
        how["resources"] = total
    else:
        how["address"] = cluster.address
        _reach(cluster.address)
    try:
        ray.init(**how)
    except Exception as error:
        # Ray raises no narrower type, for example if a node does not start in time.
        raise PlacementFailed(f"cluster.address: {cluster.address or 'local'}: {error}") from error


def _reach(address: str) -> None:
    """Fails early on an address that cannot be reached: Ray itself retries for minutes."""
    if not re.fullmatch(r"[^/]+:\d+", address):
        return
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), REACH_SECONDS).close()
    except OSError as error:
        raise PlacementFailed(f"cluster.address: {address}: {error}") from error


@contextlib.asynccontextmanager
async def _group(cluster: Cluster, shares: Mapping[str, Share], label: str) -> AsyncGenerator[Any]:
    """Yields the placement group once the cluster has room for it."""
    groups = importlib.import_module("ray.util.placement_group")
    bundles = [_bundle(share) for share in shares.values()]
    group: Any = groups.placement_group(bundles, strategy=cluster.strategy, name=label)
    try:
        try:
            async with asyncio.timeout(cluster.wait_seconds):
                await group.ready()
        except TimeoutError:
            there: Any = await asyncio.to_thread(_ray().available_resources)
            free = {name: value for name, value in there.items() if not name.startswith("node:")}
            raise PlacementFailed(
                f"the cluster had no room within {cluster.wait_seconds:g} s: wanted {cluster.strategy} "
                f"{bundles}; free {free}"
            ) from None
        yield group
    finally:
        groups.remove_placement_group(group)


def _bundle(share: Share) -> dict[str, float]:
    gpus = {"GPU": share.gpus} if share.gpus else {}
    return {"CPU": share.cpus, **gpus, **share.resources}


def _total(bundles: Sequence[Mapping[str, float]]) -> dict[str, int]:
    every = {name for bundle in bundles for name in bundle}
    return {name: math.ceil(sum(bundle.get(name, 0.0) for bundle in bundles)) for name in every}


class RayPlacement:
    """Starts processes on a cluster that has room for all of them."""

    def __init__(self, cluster: Cluster, shares: Mapping[str, Share], group: Any) -> None:
        self._cluster = cluster
        self._shares = shares
        self._bundles = {name: index for index, name in enumerate(shares)}
        self._group = group
        self._actors = 0
        self._live: set[RayProcess] = set()

    async def start(self, command: Command, on_line: OnLine | None) -> Running:
        if command.ranks > 1:
            return await self._start_ranks(command, on_line)
        process = self._begin(command, self._actor(command.name), on_line)
        return await self._begun(process, [process])

    async def close(self) -> None:
        left = list(self._live)
        for process in left:
            process.kill()
        await asyncio.gather(*(process.wait() for process in left))

    def _actor(self, name: str) -> Any:
        ray, share = _ray(), self._shares[name]
        strategies = importlib.import_module("ray.util.scheduling_strategies")
        self._actors += 1
        bundle = strategies.PlacementGroupSchedulingStrategy(
            self._group, placement_group_bundle_index=self._bundles[name]
        )
        return (
            ray.remote(RayKeeper)
            .options(
                name=f"{name}/{self._actors}",
                num_cpus=share.cpus,
                num_gpus=share.gpus,
                resources=share.resources,
                scheduling_strategy=bundle,
                max_restarts=0,
            )
            .remote(str(Path.cwd()))
        )

    def _begin(self, command: Command, actor: Any, on_line: OnLine | None) -> RayProcess:
        process = RayProcess(command, actor, on_line, one_node=self._cluster.one_node)
        self._live.add(process)
        process.living.add_done_callback(lambda _: self._live.discard(process))
        return process

    async def _begun(self, whole: Running, processes: Sequence[RayProcess]) -> Running:
        try:
            await asyncio.gather(*(process.begun.wait() for process in processes))
        except asyncio.CancelledError:
            whole.kill()
            raise
        return whole

    async def _start_ranks(self, command: Command, on_line: OnLine | None) -> Running:
        names = [rank_name(command.name, rank) for rank in range(command.ranks)]
        actors = [self._actor(name) for name in names]
        ray = _ray()
        try:
            port: Any = await actors[0].free_port.remote()
            hosts: list[Any] = await asyncio.gather(*(actor.address.remote() for actor in actors))
        except ray.exceptions.RayError:
            # An actor is already lost. Its loss is reported as the process's end, and the restart makes
            # new actors for all ranks.
            for actor in actors:
                ray.kill(actor)
            process = self._begin(command, actors[0], on_line)
            return await self._begun(process, [process])
        except asyncio.CancelledError:
            for actor in actors:
                ray.kill(actor)
            raise
        gpus = self._shares[names[0]].gpus > 0
        places = rank_environments(hosts, port, own_device=gpus)
        ranks = [
            self._begin(_rank_command(command, name, place), actor, None if rank else on_line)
            for rank, (name, place, actor) in enumerate(zip(names, places, actors, strict=True))
        ]
        return await self._begun(RankedProcess(command, ranks), ranks)


def _rank_command(command: Command, name: str, place: Mapping[str, str]) -> Command:
    log = command.log.with_name(f"{name}.log")
    environment = {**place, **command.environment}
    return replace(command, name=name, log=log, environment=environment, ranks=1)


class RayProcess:
    """One process that an actor runs."""

    def __init__(
        self, command: Command, actor: Any, on_line: OnLine | None, *, one_node: bool
    ) -> None:
        self.command = command
        self.pid = 0
        self.host = THIS_HOST
        self.begun = asyncio.Event()
        """Set when it runs, or when it is certain that it never will."""
        self.actor = actor
        self._one_node = one_node
        self._lost = ""
        self._unlogged: OSError | None = None
        self._asking: set[asyncio.Task[None]] = set()
        self.living = asyncio.create_task(self._live(on_line), name=f"{command.name} on Ray")

    async def wait(self) -> int:
        """Its exit status; that of SIGKILL if its actor was lost."""
        return await asyncio.shield(self.living)

    def signal(self, number: signal.Signals) -> None:
        if not self.living.done():
            asking = asyncio.create_task(self._unless_lost(self.actor.signal.remote(int(number))))
            self._asking.add(asking)
            asking.add_done_callback(self._asking.discard)

    async def write(self, files: Mapping[Path, str]) -> None:
        """Raises OSError, for example if the node's disk is full."""
        if self.living.done():
            return
        errors = _ray().exceptions
        try:
            await self.actor.write.remote(dict(files))
        except errors.RayTaskError as error:
            raise OSError(str(error.cause)) from error
        except errors.RayError:
            pass  # `_follow` reports the loss of the actor.

    async def stop(self, patience: float) -> None:
        await halt(self, self.living, patience)

    def kill(self) -> None:
        """Kills the actor, and with it the process."""
        if not self.living.done():
            _ray().kill(self.actor)

    def ending(self, status: int) -> str:
        if self._unlogged is not None:
            return f"cannot open its log: {self._unlogged}"
        return f"lost its actor ({self._lost})" if self._lost else ending(status)

    async def _live(self, on_line: OnLine | None) -> int:
        """Follows the process from the actor's start to its end; writes its log and passes on its lines."""
        ray = _ray()
        try:
            log = self.command.log.open("ab", buffering=0)
        except OSError as error:
            self._unlogged = error
            self.begun.set()
            ray.kill(self.actor)
            return 1
        with log:
            write = going_on(log_writer(log), str(self.command.log))
            try:
                return await self._follow(write, on_line)
            except ray.exceptions.RayError as error:
                said = str(error)
                found = WHY.search(said)
                self._lost = found[0] if found else said.partition("\n")[0]
                write(f"{said}\nlost its actor: {self._lost}\n".encode())
                return -signal.SIGKILL
            finally:
                self.begun.set()
                ray.kill(self.actor)

    async def _follow(self, write: Callable[[bytes], None], on_line: OnLine | None) -> int:
        actor = self.actor
        if not self._one_node:
            self.host = await actor.address.remote()
        # The log stays on this machine, and a node has no terminal.
        command = replace(self.command, log=Path(), inherits_terminal=False)
        self.pid = await actor.start.remote(command)
        self.begun.set()
        while True:
            lines: list[bytes] = await actor.read.remote()
            if not lines:
                return await actor.status.remote()
            write(b"".join(lines))
            if on_line is not None:
                for line in lines:
                    on_line(line.decode(errors="replace").rstrip("\n"))

    async def _unless_lost(self, answer: Awaitable[None]) -> None:
        # `_follow` reports the loss of the actor.
        with contextlib.suppress(_ray().exceptions.RayError):
            await answer


async def _finish(work: Coroutine[Any, Any, Result]) -> Result:
    """Waits for work that must not be left half done, even if the caller is cancelled meanwhile."""
    task = asyncio.create_task(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait((task,))
        raise
