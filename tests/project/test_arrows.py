"""Which room may import which: every import statement of the product, those for type checkers included.

A room is a folder with an `__init__.py`. `ROOMS` lists them from the bottom up, and a room imports only
itself and rooms below it. Server and trainer never import each other.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from functools import lru_cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = {
    "penstock": ROOT / "clients/python/penstock",
    "penstock.server": ROOT / "server",
    "penstock.trainer": ROOT / "trainer",
    "penstock.recipes": ROOT / "recipes",
}
ROOMS = [
    "v1",
    "common",
    "machine",
    "wire",
    "client",
    "client.external",
    "client.environments",
    "client.plugins",
    "rewards",
    "recipes",
    "cli",
    "server.core",
    "server.config",
    "server.engine",
    "server.text",
    "server.journal",
    "server.journal.disk",
    "server.journal.jetstream",
    "server.turns",
    "server.groups",
    "server.weights.staging",
    "server.weights",
    "server.weights.upload",
    "server.vllm.worker",
    "server.vllm",
    "server.pool",
    "server.rollouts",
    "server.rpc.trainer",
    "server.rpc",
    "server.security",
    "server.http",
    "server.journal.tools",
    "server",
    "trainer.core",
    "trainer.config",
    "trainer.state",
    "trainer.data.sources",
    "trainer.data",
    "trainer.algorithms",
    "trainer.batching",
    "trainer.policy",
    "trainer.policy.megatron",
    "trainer.exchange",
    "trainer.weights",
    "trainer.weights.collective",
    "trainer.metrics",
    "trainer.evaluation",
    "trainer.gather",
    "trainer",
    "trainer.commands",
    "up",
    "preflight",
    "demo",
    "launch",
    "penstock",
]
APART = {
    "server": {"client", "rewards", "cli", "trainer", "up", "demo"},
    "trainer": {"server", "up", "demo"},
}
"""What the rooms of a side never import, although it is listed below them."""
OF_SERVER_AND_TRAINER = {
    "up": {"server.config"},
    "demo": {"server.config"},
    "launch": {
        "server.config",
        "trainer.core",
        "trainer.config",
        "trainer.data.sources",
        "trainer",
    },
}
"""What rooms that start server and trainer as processes import of the two."""
HEAVY = {
    "vllm": {"server.vllm", "server.vllm.worker", "trainer.weights.collective"},
    "megatron": {"trainer.policy.megatron"},
    "ray": {"up"},
    "nats": {"server.journal.jetstream"},
}
"""The rooms that may import a library that is heavy, or that only some installations have."""

Sources = Mapping[str, str]
"""Source text by module, without the leading `penstock.`."""


def sources() -> dict[str, str]:
    found: dict[str, str] = {}
    for package, folder in FOLDERS.items():
        for path in folder.rglob("*.py"):
            if path.name.endswith(("_pb2.py", "_pb2_grpc.py")):
                continue
            parts = path.relative_to(folder).with_suffix("").parts
            name = ".".join((package, *parts)).removesuffix(".__init__")
            found[name.removeprefix("penstock.")] = path.read_text()
    return found


def room_of(module: str) -> str:
    """The longest room that the module's name begins with."""
    return max((r for r in ROOMS if f"{module}.".startswith(f"{r}.")), key=len)


@lru_cache(None)
def imported(source: str) -> tuple[str, ...]:
    """Every name that is imported, as far as it can be a module's."""
    found: list[str] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"line {node.lineno} imports relatively"
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return tuple(found)


def own_imports(all_sources: Sources) -> Iterator[tuple[str, str]]:
    """(module, imported module) within the product."""
    for module, source in all_sources.items():
        for name in imported(source):
            target = name.removeprefix("penstock.")
            while target not in all_sources and "." in target:
                target = target.rpartition(".")[0]
            if name.startswith("penstock.") and target != module:
                yield module, target


def forbidden(all_sources: Sources) -> list[str]:
    """The imports that no arrow between rooms allows."""
    found: list[str] = []
    for module, target in own_imports(all_sources):
        room, below = room_of(module), room_of(target)
        side, other = room.split(".")[0], below.split(".")[0]
        upward = ROOMS.index(below) > ROOMS.index(room)
        across = other in APART.get(side, ())
        deep = side in OF_SERVER_AND_TRAINER and other in ("server", "trainer")
        if upward or across or (deep and below not in OF_SERVER_AND_TRAINER[side]):
            found.append(f"{module} imports {target}")
    return found


def cycle(all_sources: Sources) -> list[str]:
    """The modules of a circle of imports; empty if there is none."""
    graph: dict[str, set[str]] = {}
    for module, target in own_imports(all_sources):
        graph.setdefault(module, set()).add(target)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_every_folder_is_a_room() -> None:
    folders = {
        ".".join((package, *path.parent.relative_to(folder).parts)).removeprefix("penstock.")
        for package, folder in FOLDERS.items()
        for path in folder.rglob("__init__.py")
    }
    assert folders == set(ROOMS)


def test_rooms_import_only_rooms_below() -> None:
    assert forbidden(sources()) == []


@pytest.mark.parametrize("room", ROOMS[1:-2])
def test_one_forbidden_import_is_found_in_any_room(room: str) -> None:
    """The import stands behind TYPE_CHECKING, inside a function, in one module of the room."""
    above = next(r for r in ROOMS[ROOMS.index(room) + 1 :])
    all_sources = sources()
    module, target = (
        next(m for m in all_sources if room_of(m) == r and m != r) for r in (room, above)
    )
    late = f"\ndef f():\n    if TYPE_CHECKING:\n        from penstock.{target} import X\n"
    found = forbidden(all_sources | {module: all_sources[module] + late})
    assert found == [f"{module} imports {target}"]


def test_server_and_trainer_are_kept_apart() -> None:
    late = "\nfrom penstock.server.core.errors import DomainError\n"
    assert forbidden(sources() | {"trainer.loop": late}) == [
        "trainer.loop imports server.core.errors"
    ]


def test_no_circle_of_modules() -> None:
    assert cycle(sources()) == []


def test_a_circle_is_found() -> None:
    pair = {
        "wire.reasons": "from penstock.wire import codec",
        "wire.codec": "from penstock.wire.reasons import Reason",
    }
    assert set(cycle(sources() | pair)) == {"wire.reasons", "wire.codec"}


@pytest.mark.parametrize("library", HEAVY)
def test_a_heavy_library_is_imported_in_its_rooms_only(library: str) -> None:
    rooms = {
        room_of(module)
        for module, source in sources().items()
        if any(name.split(".")[0] == library for name in imported(source))
        or f'import_module("{library}' in source
    }
    assert rooms <= HEAVY[library]


def test_ray_is_imported_in_one_module_only() -> None:
    naming = [
        module
        for module, source in sources().items()
        if any(name.split(".")[0] == "ray" for name in imported(source))
        or 'import_module("ray' in source
    ]
    assert naming == ["up.ray_placement"]
