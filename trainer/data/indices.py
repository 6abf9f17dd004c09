"""A run's position in its data: which indices were submitted, and their state. No I/O.

    never submitted -> outstanding -> taken (a group of its task is in hand) -> settled (trained or refused)
                           ^              |
                           +--------------+   the trainer died: its checkpoint has it outstanding;
                                              or the group was dropped, and its prompt is asked again

Each server is given its own indices in order, as fast as it uses them up, so one whose groups are dropped
more often is ahead of the others. `next_index` is the first index after all submitted ones. `unasked` are
earlier indices that their server has not reached; with one server there are none.

A killed trainer may have submitted more than its saved state shows. If a group arrives for an unknown
index, its server was given all its indices up to that one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import count, islice, takewhile

from penstock.trainer.data.shards import Division


class DataIndices:
    """Tracks the state of every index of one run."""

    def __init__(
        self,
        division: Division,
        next_index: int = 0,
        outstanding: Iterable[int] = (),
        unasked: Iterable[int] = (),
    ) -> None:
        """`outstanding` and `unasked` are indices before `next_index`."""
        self.division = division
        self.next_index = next_index
        self._outstanding = dict.fromkeys(outstanding)
        # Ascending, because later additions are ascending too.
        self._unasked = dict.fromkeys(sorted(unasked))
        self._taken: set[int] = set()

    @property
    def outstanding(self) -> tuple[int, ...]:
        """Indices submitted and not settled, including taken ones, in the order of the data."""
        return tuple(sorted(self._outstanding))

    @property
    def unasked(self) -> tuple[int, ...]:
        """Indices before `next_index` that were never submitted."""
        return tuple(self._unasked)

    def waiting(self, server: int) -> list[int]:
        """Returns the indices of a server that are outstanding and not in hand, in the data's order."""
        return [
            index
            for index in sorted(self._outstanding)
            if index not in self._taken and self.division.server_of(index) == server
        ]

    def upcoming(self, server: int, number: int) -> list[int]:
        """Returns the next indices to submit to a server. Only `submitted` counts them as submitted."""
        return list(islice(self._of(server), number))

    def submitted(self, indices: Iterable[int]) -> None:
        """Records that a server has these indices, in the order of `upcoming`. Groups for them may
        already have arrived and been trained meanwhile, which this keeps."""
        for index in indices:
            self.known(index)

    def known(self, index: int) -> list[int]:
        """Records that a server knows this index, and therefore all its earlier ones. Returns the newly
        discovered earlier ones. They were submitted if the indices were divided then as they are now."""
        server = self.division.server_of(index)
        self._unasked |= dict.fromkeys(range(self.next_index, index + 1))
        self.next_index = max(self.next_index, index + 1)
        if index not in self._unasked:
            return []
        found = [
            i
            for i in takewhile(lambda i: i <= index, self._unasked)
            if i == index or self.division.server_of(i) == server
        ]
        for i in found:
            del self._unasked[i]
            self._outstanding[i] = None
        return found[:-1]

    def take(self, index: int) -> bool:
        """Marks an index as having a group in hand. Returns False if it already has one, or is settled."""
        if index in self._taken or index not in self._outstanding:
            return False
        self._taken.add(index)
        return True

    def is_outstanding(self, index: int) -> bool:
        """Returns whether an index was submitted and is not settled."""
        return index in self._outstanding

    def give_back(self, index: int) -> None:
        """Releases an index whose group was dropped, so that another group is taken."""
        self._taken.discard(index)

    def settle(self, index: int) -> None:
        """Marks an index as trained or refused."""
        self._outstanding.pop(index, None)
        self._taken.discard(index)

    def _of(self, server: int) -> Iterator[int]:
        yield from (i for i in self._unasked if self.division.server_of(i) == server)
        yield from (i for i in count(self.next_index) if self.division.server_of(i) == server)
