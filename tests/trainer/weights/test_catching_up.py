"""What a trainer decides before its first step, from what its servers have."""

from __future__ import annotations

import pytest

from penstock.trainer.core.errors import ConfigInvalid
from penstock.trainer.weights.base import Base
from penstock.trainer.weights.catching_up import Plan, agreed_dtype, make_plan
from penstock.v1 import rollout_service_pb2

Info = rollout_service_pb2.GetServerInfoResponse
AWAY = rollout_service_pb2.REPLICA_STATE_UNAVAILABLE
SERVING = rollout_service_pb2.REPLICA_STATE_SERVING

HELD = 5


def info(active: int, *staged: int, replicas: tuple[int, ...] = ()) -> Info:
    made = Info(active_weight_version=active, staged_weight_versions=staged)
    for state in replicas:
        made.replicas.add().state = state
    return made


@pytest.mark.parametrize(
    ("infos", "repeatable", "plan"),
    [
        ([info(5), info(5)], [], Plan(5, [], [], [0, 0])),
        ([info(5), info(0)], [], Plan(5, [1], [], [0, 0])),
        ([info(4, 5), info(5)], [], Plan(5, [], [0], [0, 0])),
        ([info(7), info(4)], [6, 7], Plan(5, [1], [], [7, 0], is_sampled=True)),
        # Only staged, so evaluations of what the trainer holds may begin.
        ([info(5, 6), info(5)], [6], Plan(5, [], [], [6, 0])),
        # Unknown here: passed over, on every server.
        ([info(7), info(4)], [6], Plan(8, range(2), (), [0, 0], repeats=False)),
        ([info(7), info(4)], [], Plan(8, range(2), (), [0, 0], repeats=False)),
        # A server that serves nothing, and one whose hub still has another engine.
        ([info(5, replicas=(AWAY,)), info(5)], [], Plan(6, range(2), (), [0, 0])),
        ([info(5, replicas=(AWAY, SERVING))], [], Plan(5, [], [], [0])),
    ],
)
def test_who_is_sent_what(infos: list[Info], repeatable: list[int], plan: Plan) -> None:
    assert make_plan(infos, HELD, repeatable) == plan


def test_servers_take_weights_in_one_dtype() -> None:
    assert agreed_dtype([Info(weight_dtype="bfloat16")] * 2) == "bfloat16"
    with pytest.raises(ConfigInvalid, match="got bfloat16, float32"):
        agreed_dtype([Info(weight_dtype="bfloat16"), Info(weight_dtype="float32")])


def test_a_server_that_refuses_every_difference_is_sent_none_for_good() -> None:
    base = Base(anchor_every=50)
    for version in range(3):
        base.version = version
        assert base.may_exist
        base.refused()
        assert base.version is None
    assert base.is_refused and not base.may_exist
    base.sent(delta=False)
    assert not base.may_exist
