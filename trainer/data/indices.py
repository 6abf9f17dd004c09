"""Where a run is in its data: what was submitted, and what has become of it. No I/O.

States of a data index:

    never submitted -> outstanding -> taken (a group of its task is in hand) -> settled (trained or refused)
                           ^              |
                           +--------------+   the trainer died: its checkpoint has it outstanding;
                                              or the group was of no use, and its prompt is asked again

Each server is given its own indices in their order, and as many as it uses up: one whose groups are dropped
more often is ahead of the others. `next_index` is the first after all that were submitted; `unasked` are
those before it whose server has not come to them. With one server there are none.

A trainer that was killed may have gone further than the state it left. A group of an index that is unknown
here says that its server was given all of its indices up to that one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import count, islice, takewhile

from penstock.trainer.data.shards import Division


class DataIndices:
    """The indices of one run."""

    def __init__(
        self,
        division: Division,
        next_index: int = 0,
        outstanding: Iterable[int] = (),
        unasked: Iterable[int] = (),
    ) -> None:
        """`outstanding` and `unasked` are indices before `next_index`."""
        self._division = division
        self.next_index = next_index
        self._outstanding = dict.fromkeys(outstanding)
        # Ascending, as all that is added to it is.
        self._unasked = dict.fromkeys(sorted(unasked))
        self._taken: set[int] = set()

    @property
    def outstanding(self) -> tuple[int, ...]:
        """Those submitted and not settled, taken ones included, in the order of the data."""
        return tuple(sorted(self._outstanding))

    @property
    def unasked(self) -> tuple[int, ...]:
        """Those before `next_index` that were never submitted."""
        return tuple(self._unasked)

    def waiting(self, server: int) -> list[int]:
        """Those of a server that are outstanding and not in hand, in the order of the data."""
        return [
            index
            for index in sorted(self._outstanding)
            if index not in self._taken and self._division.server_of(index) == server
        ]

    def upcoming(self, server: int, number: int) -> list[int]:
        """The next ones to submit to a server; they are submitted only with `submitted`."""
        return list(islice(self._of(server), number))

    def submitted(self, indices: Iterable[int]) -> None:
        """A server has these, in the order of `upcoming`. While it was asked, groups of theirs may have
        come, and been trained: that stands."""
        for index in indices:
            self.known(index)

    def known(self, index: int) -> list[int]:
        """A server knows this index, and so every one before it that is its own; returns those of which
        nothing was known. They were submitted to it where the indices were divided then as they are now."""
        server = self._division.server_of(index)
        self._unasked |= dict.fromkeys(range(self.next_index, index + 1))
        self.next_index = max(self.next_index, index + 1)
        if index not in self._unasked:
            return []
        found = [
            i
            for i in takewhile(lambda i: i <= index, self._unasked)
            if i == index or self._division.server_of(i) == server
        ]
        for i in found:
            del self._unasked[i]
            self._outstanding[i] = None
        return found[:-1]

    def take(self, index: int) -> bool:
        """A group of it is in hand; False where another one is, or it is settled."""
        if index in self._taken or index not in self._outstanding:
            return False
        self._taken.add(index)
        return True

    def is_outstanding(self, index: int) -> bool:
        """Whether it was submitted and is not settled."""
        return index in self._outstanding

    def give_back(self, index: int) -> None:
        """The group in hand was of no use, and another is to come."""
        self._taken.discard(index)

    def settle(self, index: int) -> None:
        """A group of it was trained or refused."""
        self._outstanding.pop(index, None)
        self._taken.discard(index)

    def _of(self, server: int) -> Iterator[int]:
        yield from (i for i in self._unasked if self._division.server_of(i) == server)
        yield from (i for i in count(self.next_index) if self._division.server_of(i) == server)
