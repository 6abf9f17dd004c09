"""The figures in docs/operations/sizing.md for the tree that distributes a version to the hosts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest
from benchmarks.pool.scale import DEPLOYMENTS, GPU, Measured, load, tree

from penstock.server.pool.fanout import Branches
from penstock.server.pool.member import Member


class Host:
    """The part of a member that the tree uses."""

    hands_on = True


def grown(hosts: int, branches: int) -> tuple[int, int]:
    """Grow a tree of hosts that join one by one, as `Branches` does. Return the uploads that
    the hub sends, and the hops to the farthest host."""
    tree = Branches(branches)
    hops: dict[Any, int] = {None: 0}
    sent = 0
    for _ in range(hosts):
        source = tree.take(())
        host = cast(Member, Host())
        tree.add([host])
        sent += source is None
        hops[host] = hops[source] + 1
    return sent, max(hops.values())


@pytest.mark.parametrize("branches", [0, 1, 2, 3, 5])
@pytest.mark.parametrize("hosts", [1, 2, 3, 6, 7, 14, 15, 100])
def test_the_tree_is_that_of_a_pool(hosts: int, branches: int) -> None:
    assert tree(hosts, branches) == grown(hosts, branches)


def test_hosts_are_sent_what_changed_where_that_is_less() -> None:
    made = load(replace(GPU, engines=4), Measured())
    assert made.hubs == 1
    assert made.uploaded_bytes == pytest.approx(GPU.model_bytes * GPU.delta)
    assert made.version_bytes == pytest.approx(4 * GPU.model_bytes * GPU.delta)
    whole = load(replace(GPU, engines=4, delta=0.6), Measured())
    assert whole.version_bytes == 2 * GPU.model_bytes
    # Many hubs have few hosts each. The comparison is with a single hub that has all hosts.
    many, link = load(replace(GPU, engines=128), Measured()), Measured().stream_bytes_per_second
    assert many.version_bytes == pytest.approx(16 * GPU.model_bytes * GPU.delta)
    alone = many.fullest["link of one hub, weights"]
    assert alone == pytest.approx(2 * GPU.model_bytes / link / GPU.step_seconds)


def test_the_context_goes_out_again_with_each_turn() -> None:
    once = load(replace(GPU, turns=1), Measured())
    often = load(replace(GPU, turns=9), Measured())
    # Of nine turns, the average turn follows four others; a token has 4 bytes.
    assert often.token_bytes - once.token_bytes == pytest.approx(4 * 4 * once.tokens)


@pytest.mark.parametrize("deployment", DEPLOYMENTS, ids=lambda one: one.name)
def test_every_share_is_a_number(deployment: Any) -> None:
    made = load(deployment, Measured())
    assert all(0 <= share < 1_000 for share in made.fullest.values())
