"""Resolves environments by their name on the command line: `textarena:GAME`,
`reasoning_gym:DATA_SET`, `pkg.module:Class`.

Only the command line of the worker can name code. A task can choose among the environments named there. If
a name is just `textarena` or `reasoning_gym`, a task can choose any of its games or data sets.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, cast

from penstock.client.environments.environment import (
    Environment,
    EnvironmentInvalid,
    TaskUnusable,
    read_episode,
)
from penstock.client.environments.episode import EpisodeLimits, play
from penstock.client.environments.threads import CallThreads
from penstock.client.scoring import BadFunction
from penstock.common.distribution import pip_install
from penstock.common.functions import FunctionInvalid, find_function
from penstock.common.settings import SettingInvalid, Table, apply_setting

if TYPE_CHECKING:
    from penstock.client.environments.settings import EnvironmentSettings
    from penstock.client.outcome import Outcome
    from penstock.client.tasks import Task
    from penstock.client.trajectory import Trajectory

Factory = Callable[[], Environment]

TEXTARENA = "textarena"
REASONING_GYM = "reasoning_gym"
FAMILIES = (TEXTARENA, REASONING_GYM)
OWN = "environment"
EPISODE = "episode"
_SECTIONS = (EPISODE, OWN, *FAMILIES)


def load_agent(
    environments: EnvironmentSettings,
) -> Callable[[Task, Trajectory], Awaitable[Outcome]]:
    """Returns an agent that plays one episode per task. Raises BadFunction."""
    names = environments.names
    sections = _read_settings(environments.settings)
    try:
        limits = EpisodeLimits(**cast("Mapping[str, float]", sections[EPISODE]))  # pyright: ignore[reportArgumentType]
    except (TypeError, ValueError) as error:
        raise BadFunction(f"--set {EPISODE}: {error}") from error
    known = {name: _check(name, sections) for name in names}
    threads = CallThreads()

    async def agent(task: Task, trajectory: Trajectory) -> Outcome:
        name = choose(read_episode(task).name, names)
        make = known.get(name) or _find(name, sections)
        environment = await threads.run(make)
        return await play(environment, task, trajectory, limits=limits, threads=threads, name=name)

    return agent


def choose(wanted: str, names: Sequence[str]) -> str:
    """Returns the environment for a task that asks for `wanted`. Raises TaskUnusable."""
    if wanted in names or (wanted and wanted.partition(":")[0] in set(names) & set(FAMILIES)):
        return wanted
    if not wanted and len(names) == 1:
        return names[0]
    asked = repr(wanted) if wanted else "no particular environment"
    raise TaskUnusable(f"the task asks for {asked}, but this worker offers {', '.join(names)}")


def _read_settings(settings: Sequence[str]) -> dict[str, Table]:
    sections: Table = {}
    try:
        for setting in settings:
            apply_setting(sections, setting)
    except SettingInvalid as error:
        raise BadFunction(str(error)) from error
    for name, section in sections.items():
        if name not in _SECTIONS or not isinstance(section, dict):
            raise BadFunction(f"--set {name}: the section must be one of {', '.join(_SECTIONS)}")
    return {name: cast("Table", sections.get(name, {})) for name in _SECTIONS}


def _check(name: str, sections: Mapping[str, Table]) -> Factory:
    """Tries the factory once, so that errors surface before an attempt is leased."""
    try:
        make = _find(name, sections)
        if name == TEXTARENA:
            import textarena  # noqa: F401  # pyright: ignore[reportUnusedImport]
        else:
            made = make()
            if not isinstance(made, Environment):
                raise EnvironmentInvalid(f"a {type(made).__name__} has no reset and step")
    except ModuleNotFoundError as error:
        hint = pip_install("environments")
        raise BadFunction(f"--environment {name}: {error}: {hint}") from error
    except (EnvironmentInvalid, FunctionInvalid, TypeError) as error:
        raise BadFunction(f"--environment {name}: {error}") from error
    return make


def _find(name: str, sections: Mapping[str, Table]) -> Factory:
    """Returns a factory for an environment. Raises FunctionInvalid, ModuleNotFoundError."""
    family, _, which = name.partition(":")
    if family == TEXTARENA:
        from penstock.client.environments.text_arena import TextArena

        return lambda: TextArena(which, **sections[TEXTARENA])  # pyright: ignore[reportArgumentType]
    if family == REASONING_GYM:
        from penstock.client.environments.reasoning import ReasoningGym

        return lambda: ReasoningGym(which, **sections[REASONING_GYM])  # pyright: ignore[reportArgumentType]
    make = find_function(name, (), sections[OWN])
    return lambda: cast("Environment", make(**sections[OWN]))
