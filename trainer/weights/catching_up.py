"""How trainer and servers come to agree on weights at the start, and what is repeated for that.

A run that resumes after step K has its checkpoint. Its ledger may also list steps that the previous
trainer did beyond it. The cases:

    killed after the line of K+1,  the server samples at most K. K is published if the server lacks it,
      before its upload was whole    and K+1 is done again
    killed anywhere later          the server samples a version N > K that no checkpoint contains, and
                                     continues to sample it. The trainer catches up: it repeats steps
                                     K+1.. with the same groups, and publishes nothing, because the server
                                     is past them. Once it holds N, with identical weights, the run
                                     continues as usual
    a group is lost meanwhile,     the step comes out differently than the ledger records. Its weights are
      or the arithmetic differs      published at once as N+1; later steps get new lines
    late policy "wait", max_lag    the gate delivers one batch for each version, so K is published as
      above zero                     N+1 at once
    the server has lost all        K is published, and outstanding tasks are submitted again

A server that restarts during the run is given the version that the trainer holds. If the payload
already contains the next version, this is impossible. The server then keeps what it has until the
next switch, and pinned evaluations, for which the switch waits, are ended.

Several servers, killed and restarted at different times, may be in different states. Each is
handled separately. A server with an older version is given the trainer's; a server that has it is
skipped. They reach the same version when the trainer catches up, or earlier:

    some at N, others before it    the trainer catches up. Each version on the way goes only to the
      or empty                       servers that lack it
    one has a version that is      this run's weights get a greater number than any server has, and go to
      unknown here, or serves        all of them
      nothing
    the step comes out             its weights get a greater number than any server has, likewise
      differently
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from penstock.trainer.core.errors import ConfigInvalid
from penstock.v1 import rollout_service_pb2

log = logging.getLogger(__name__)

UNAVAILABLE = rollout_service_pb2.REPLICA_STATE_UNAVAILABLE

Infos = Sequence[rollout_service_pb2.GetServerInfoResponse]
"""The description of each server, all of the same moment."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What is done before the first step. Servers are identified by index."""

    weight_version: int
    """The version that the trainer's weights have."""
    lacking: Sequence[int]
    """Servers that are sent the version."""
    staged: Sequence[int]
    """Servers that have the version, but do not sample it: the previous trainer died before the switch."""
    inherited: Sequence[int]
    """For each server the newest version that it has from the previous trainer and this trainer has
    not reached; zero if there is none."""
    is_sampled: bool = False
    """Whether any server samples an inherited version, rather than only having it staged."""
    repeats: bool = True
    """Whether the steps beyond the checkpoint are repeated, rather than passed over."""


def make_plan(infos: Infos, held: int, repeatable: Collection[int]) -> Plan:
    """Decide which servers are sent which version.

    A server starts with the base model, as version 0. If a server has seen versions that are unknown here,
    this run's weights get a greater number than all of them, because versions only grow. A server that
    serves nothing, because it could not load a version, is given one whatever its number.

    `held` is the version that the trainer holds. `repeatable` has the versions of the steps beyond
    it that can be repeated with the same groups.
    """
    newest = [newest_version(info) for info in infos]
    if any(_is_foreign(info, held, repeatable) for info in infos):
        return Plan(
            max(newest) + 1,
            lacking=range(len(infos)),
            staged=(),
            inherited=[0] * len(infos),
            repeats=max(newest) <= held,
        )
    if max(newest) > held:
        log.warning(
            "the server samples version %d, made by steps that no checkpoint contains: "
            "repeating them before publishing anything",
            max(newest),
        )
    return Plan(
        held,
        lacking=[server for server, version in enumerate(newest) if version < held],
        staged=[
            server
            for server, info in enumerate(infos)
            if newest[server] == held and info.active_weight_version != held
        ],
        inherited=[version if version > held else 0 for version in newest],
        is_sampled=any(info.active_weight_version > held for info in infos),
    )


def newest_version(info: rollout_service_pb2.GetServerInfoResponse) -> int:
    """Return the newest version that a server has, staged or active."""
    return max(info.active_weight_version, *info.staged_weight_versions, 0)


def agreed_dtype(infos: Infos) -> str:
    """Return the dtype in which all servers take weights. Raises ConfigInvalid if they differ."""
    dtypes = dict.fromkeys(info.weight_dtype for info in infos)
    if len(dtypes) > 1:
        raise ConfigInvalid(
            "server.address: the servers of a run must take weights in one dtype, got "
            f"{', '.join(dtypes)}"
        )
    return next(iter(dtypes))


def _is_foreign(
    info: rollout_service_pb2.GetServerInfoResponse, held: int, repeatable: Collection[int]
) -> bool:
    """Return whether a server's state rules out continuing from this run's weights, so that it needs
    a greater version."""
    newest = newest_version(info)
    if newest < held:
        return False
    # One engine of a hub may be away at any time. The hub brings it up to date.
    away = [replica.state == UNAVAILABLE for replica in info.replicas]
    serves = not (away and all(away))
    return not serves or (newest > held and newest not in repeatable)
