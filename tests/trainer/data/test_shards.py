"""Which server makes which group, and the position in the data of a run divided over several servers."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from penstock.trainer.data.indices import DataIndices
from penstock.trainer.data.shards import Division

divisions = st.integers(1, 40).flatmap(
    lambda groups: st.builds(Division, st.just(groups), st.integers(1, groups))
)


@given(divisions)
def test_parts_sum_up_to_the_step_and_differ_by_one_at_most(division: Division) -> None:
    parts = division.parts
    assert len(parts) == division.server_count and sum(parts) == division.groups_per_step
    assert min(parts) >= 1 and max(parts) - min(parts) <= 1


@given(divisions, st.integers(0, 10_000))
def test_of_a_steps_worth_of_indices_each_server_has_exactly_its_part(
    division: Division, begin: int
) -> None:
    owners = Counter(
        division.server_of(index) for index in range(begin, begin + division.groups_per_step)
    )
    assert [owners[server] for server in range(division.server_count)] == list(division.parts)


def test_what_the_docstring_says() -> None:
    division = Division(8, 3)
    assert (division.parts, division.server_of(12)) == ((3, 3, 2), 1)


actions = st.lists(st.tuples(st.integers(0, 4), st.integers(1, 6), st.integers(0, 3)), max_size=40)


@given(divisions, actions)
def test_every_index_is_submitted_once_to_its_server_and_none_is_passed_over(
    division: Division, steps: list[tuple[int, int, int]]
) -> None:
    indices = DataIndices(division)
    given_to: dict[int, list[int]] = {server: [] for server in range(division.server_count)}
    settled: set[int] = set()
    for place, number, settles in steps:
        server = place % division.server_count
        upcoming = indices.upcoming(server, number)
        indices.submitted(upcoming)
        given_to[server] += upcoming
        for index in given_to[server][:settles]:
            indices.settle(index)
            settled.add(index)
    for server, own in given_to.items():
        # The server's own indices, in the order of the data, without a gap.
        assert own == [
            i for i in range(own[-1] + 1 if own else 0) if division.server_of(i) == server
        ]
    submitted = {index for own in given_to.values() for index in own}
    assert indices.next_index == max(submitted, default=-1) + 1
    assert set(indices.unasked) == set(range(indices.next_index)) - submitted
    assert set(indices.outstanding) == submitted - settled
    # A trainer that resumes continues at the same position.
    again = DataIndices(division, indices.next_index, indices.outstanding, indices.unasked)
    for server in range(division.server_count):
        assert again.upcoming(server, 5) == indices.upcoming(server, 5)
        assert again.waiting(server) == indices.waiting(server)


def test_what_came_while_a_server_was_asked_stands() -> None:
    indices = DataIndices(Division(2, 2))
    first, second = indices.upcoming(0, 2), indices.upcoming(1, 2)
    assert (first, second) == ([0, 2], [1, 3])
    # Two servers are asked at the same time. Meanwhile a group arrives and is trained.
    indices.submitted(second)
    assert indices.unasked == (0, 2)
    indices.known(0)
    indices.settle(0)
    indices.submitted(first)
    assert (indices.outstanding, indices.unasked, indices.next_index) == ((1, 2, 3), (), 4)


def test_a_group_of_an_unknown_index_says_how_far_its_server_was_given() -> None:
    indices = DataIndices(Division(4, 2), next_index=2, outstanding=(0, 1))
    indices.known(7)
    assert (indices.outstanding, indices.unasked, indices.next_index) == (
        (0, 1, 3, 5, 7),
        (2, 4, 6),
        8,
    )
    indices.known(4)
    assert (indices.outstanding, indices.unasked) == ((0, 1, 2, 3, 4, 5, 7), (6,))
    assert indices.upcoming(0, 2) == [6, 8]


def test_an_index_is_taken_once_until_it_is_given_back() -> None:
    indices = DataIndices(Division(1), next_index=2, outstanding=(0, 1))
    assert indices.take(0) and not indices.take(0)
    assert indices.waiting(0) == [1]
    indices.give_back(0)
    assert indices.take(0)
    indices.settle(0)
    assert not indices.take(0) and not indices.is_outstanding(0)
