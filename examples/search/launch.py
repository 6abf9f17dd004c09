"""Runs the whole example with one command: `.venv/bin/python examples/search/launch.py`.

    install what is missing -> model -> corpus, indexes -> retrieval servers -> `penstock up` -> figures

It takes options of `penstock up`: `--set train.run.steps=5`, `--resume`. Retrieval and agent are configured
in `search.toml`, or in the file that `--settings` names.

The launcher restarts a retrieval server that dies, on the same port, so that the addresses known to the
agents stay valid. Meanwhile agents use its replicas. If a server cannot run, everything stops. If this
process ends for any reason, the kernel ends the servers that it started.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click
import tomli_w

from penstock.demo.model import ModelUnavailable, prepare_model
from penstock.up.config import UpConfigInvalid, load
from penstock.up.processes import (
    Command,
    FirstMatch,
    Process,
    ProcessFailed,
    end,
    ending,
    explain,
)
from penstock.up.supervisor import RestartBudget, Restarts

if TYPE_CHECKING:
    from research.settings import Settings

HERE = Path(__file__).resolve().parent
ADD_EXTRA = HERE.parents[1] / ".ci" / "add_extra.py"
SERVING = re.compile(r"^retrieval serving .* at http://(\S+:\d+)$")
UNUSABLE = 2
"""Exit status if nothing could be started."""


def say(who: str, what: str) -> None:
    """Prints one line of progress, in the format of `penstock up`."""
    print(f"{who:8} {what}", flush=True)


class RetrievalServers:
    """Runs the retrieval servers of all shards; `keep` starts and restarts them."""

    def __init__(self, settings: Settings, corpus: Path, logs: Path) -> None:
        self._settings, self._corpus, self._logs = settings.retrieval, corpus, logs
        self._newest: dict[str, Process] = {}
        self._serving = asyncio.Event()
        self.addresses: dict[str, str] = {}
        """HOST:PORT of each server, by its name."""

    @property
    def names(self) -> list[list[str]]:
        """Names of the servers, by shard."""
        shards, replicas = self._settings.shards, self._settings.replicas
        return [
            [f"retrieval-{shard}-{replica}" for replica in range(1, replicas + 1)]
            for shard in range(1, shards + 1)
        ]

    @property
    def processes(self) -> list[Process]:
        """The latest process of each server."""
        return list(self._newest.values())

    async def urls(self) -> tuple[tuple[str, ...], ...]:
        """Waits until all servers serve; returns their URLs, by shard."""
        await self._serving.wait()
        return tuple(tuple(f"http://{self.addresses[name]}" for name in own) for own in self.names)

    async def keep(self) -> None:
        """Starts the servers, and restarts those that die. Never returns.

        Raises ProcessFailed if a server fails too often.
        """
        async with asyncio.TaskGroup() as keeping:
            for shard, names in enumerate(self.names, start=1):
                for name in names:
                    keeping.create_task(self._keep(name, shard))

    async def _keep(self, name: str, shard: int) -> None:
        budget = RestartBudget(Restarts())
        while True:
            line = FirstMatch(SERVING)
            process = Process.start(self._command(name, shard), line)
            self._newest[name] = process
            self.addresses[name] = await line.wait(process)
            say(name, f"serves at {self.addresses[name]}")
            if len(self.addresses) == self._settings.shards * self._settings.replicas:
                self._serving.set()
            status = await process.wait()
            seconds = budget.wait()
            if seconds is None:
                raise ProcessFailed(explain(process, status))
            say(name, f"{ending(status)}; starting again in {seconds:g} s")
            await asyncio.sleep(seconds)

    def _command(self, name: str, shard: int) -> Command:
        settings = self._settings
        kinds = {"hybrid": "bm25,embeddings"}.get(settings.method, settings.method)
        arguments = (
            *(sys.executable, "-m", "research.retrieval_server", str(self._corpus)),
            *("--listen", self.addresses.get(name, "127.0.0.1:0")),
            *("--shard", f"{shard}/{settings.shards}", "--kinds", kinds),
            *("--window", str(settings.window_seconds), "--max-batch", str(settings.max_batch)),
        )
        # Leaves the cores to the engine and the trainer.
        environment = {"PYTHONPATH": str(HERE), "OMP_NUM_THREADS": "1"}
        return Command(name, arguments, self._logs / f"{name}.log", environment)


async def run_all(settings: Settings, corpus: Path, out: Path, command: list[str]) -> int:
    """Runs retrieval servers and `penstock up`; returns the exit status of `penstock up`."""
    from research import settings as settings_module

    servers = RetrievalServers(settings, corpus, out)
    keeping: asyncio.Task[None] | None = None
    try:
        if not settings.retrieval.servers:
            keeping = asyncio.create_task(servers.keep())
            asking = asyncio.create_task(servers.urls())
            await asyncio.wait((keeping, asking), return_when=asyncio.FIRST_COMPLETED)
            if keeping.done():
                await keeping
            retrieval = settings.retrieval.model_copy(update={"servers": asking.result()})
            settings = settings.model_copy(update={"retrieval": retrieval})
        resolved = out / "search.toml"
        resolved.write_text(tomli_w.dumps(settings.model_dump(mode="json")), encoding="utf-8")
        return await _run_up(command, {settings_module.VARIABLE: str(resolved)}, keeping)
    finally:
        if keeping is not None:
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)
        await end(servers.processes)


async def _run_up(
    command: list[str], environment: dict[str, str], keeping: asyncio.Task[None] | None
) -> int:
    up = await asyncio.create_subprocess_exec(*command, cwd=HERE, env={**os.environ, **environment})
    loop = asyncio.get_running_loop()

    def stop(number: signal.Signals) -> None:
        # A terminal's Ctrl-C reaches `up` directly.
        if up.returncode is None and number is not signal.SIGINT:
            up.send_signal(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop, number)
    ended = asyncio.create_task(up.wait())
    await asyncio.wait(
        (ended, *([keeping] if keeping else [])), return_when=asyncio.FIRST_COMPLETED
    )
    if not ended.done():
        # A retrieval server failed too often.
        up.terminate()
    status = await ended
    if keeping is not None and keeping.done():
        await keeping
    return status


@click.command()
@click.option(
    "--config",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    default=HERE / "run.toml",
    help="Configuration file for `penstock up`.",
)
@click.option(
    "--settings",
    "settings_path",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    default=HERE / "search.toml",
    help="Settings of retrieval, agent and reward.",
)
@click.option("--model", help="A folder, or a name on the hub. Default: SmolLM2-135M-Instruct.")
@click.option("--resume", is_flag=True, help="Continue the run in the file's folder.")
@click.option(
    "--prepare", "only_prepare", is_flag=True, help="Prepare everything, but start nothing."
)
@click.option("--set", "overrides", multiple=True, metavar="SECTION.KEY=VALUE")
def main(
    config: Path,
    settings_path: Path,
    model: str | None,
    resume: bool,
    only_prepare: bool,
    overrides: tuple[str, ...],
) -> None:
    """Prepare and run the search agent's training."""
    status = subprocess.run([sys.executable, str(ADD_EXTRA), "search"], check=False).returncode
    if status:
        sys.exit(UNUSABLE)
    sys.path.insert(0, str(HERE))
    from research import settings as settings_module
    from research.corpus import CorpusUnavailable
    from research.figures import print_summary
    from research.prepare import prepare
    from research.retrieval_client import KINDS

    try:
        settings = settings_module.load(settings_path)
        folder = prepare_model(model, lambda text: say("model", text))
        settled = [*overrides, f"serve.engine.model={folder}"]
        out = HERE / load(config, settled).up.out
        corpus = prepare(KINDS[settings.retrieval.method], lambda text: say("corpus", text))
    except (
        settings_module.SettingsInvalid,
        UpConfigInvalid,
        ModelUnavailable,
        CorpusUnavailable,
    ) as error:
        sys.stderr.write(f"launch.py: {error}\n")
        sys.exit(UNUSABLE)
    if only_prepare:
        return
    out.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "penstock.cli", "up", str(config.resolve())]
    command += [part for override in settled for part in ("--set", override)]
    command += ["--resume"] if resume else []
    try:
        status = asyncio.run(run_all(settings, corpus, out, command))
    except* ProcessFailed as failed:
        sys.stderr.write(f"launch.py: {failed.exceptions[0]}\n")
        status = 1
    print_summary(out)
    sys.exit(status)


if __name__ == "__main__":
    main()
