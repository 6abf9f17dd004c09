"""Task ids: ids of held tasks are never forgotten; ids of past tasks are remembered for a while."""

from __future__ import annotations

from penstock.server.groups.pending_tasks import KnownTasks


def test_what_is_held_is_known_however_many_others_left() -> None:
    known = KnownTasks(max_past=2)
    known.hold("slow")
    for number in range(10):
        known.hold(str(number))
        known.leave(str(number))
    assert "slow" in known
    assert list(known) == ["8", "9", "slow"]


def test_a_task_that_waits_again_is_held_again() -> None:
    known = KnownTasks(max_past=1)
    known.hold("a")
    known.leave("a")
    known.hold("a")
    known.hold("b")
    known.leave("b")
    assert "a" in known and "b" in known


def test_what_never_was_held_does_not_leave() -> None:
    known = KnownTasks()
    known.leave("another caller's group")
    assert list(known) == []


def test_a_server_takes_up_what_is_held_and_the_newest_of_the_rest() -> None:
    known = KnownTasks(max_past=2)
    known.restore(["a", "waits", "b", "c"], ["waits"])
    assert list(known) == ["b", "c", "waits"]
    known.clear()
    assert "waits" not in known and "c" not in known
