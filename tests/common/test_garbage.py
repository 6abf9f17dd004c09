"""What the garbage collector leaves alone: a process that ends, and what a server's start made."""

from __future__ import annotations

import subprocess
import sys

from penstock.common.garbage import OBJECTS_BETWEEN_SEARCHES

CYCLE = """
import gc
from penstock.common.garbage import quicken, start_up_kept

class Cycle:
    def __init__(self): self.own = self
    def __del__(self): print("collected", flush=True)

"""


def printed(*lines: str) -> list[str]:
    """The words that a process prints which runs these lines and ends."""
    code = CYCLE + "\n".join(lines)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.split()


THRESHOLD = "print(gc.get_threshold()[0], flush=True)"


def test_a_process_that_ends_is_not_searched_for_cycles() -> None:
    assert printed("kept = Cycle()") == ["collected"]
    assert printed("quicken()", "kept = Cycle()", THRESHOLD) == [str(OBJECTS_BETWEEN_SEARCHES)]


def test_searches_are_as_usual_once_nothing_is_imported() -> None:
    once, twice = (
        f"live = [[] for _ in range({count * OBJECTS_BETWEEN_SEARCHES + 10})]" for count in (1, 2)
    )
    usual, while_importing, after = printed(
        *(THRESHOLD, "quicken(); quicken()", once, "import xml.dom.minidom", THRESHOLD),
        *(twice, THRESHOLD),
    )
    assert (while_importing, after) == (str(OBJECTS_BETWEEN_SEARCHES), usual)
    assert usual != while_importing


def test_what_was_there_is_left_alone_until_the_block_ends() -> None:
    assert printed(
        "kept = Cycle()",
        "with start_up_kept():",
        "    del kept; Cycle(); gc.collect(); print('within', flush=True)",
        "gc.collect(); print('after', flush=True)",
    ) == ["collected", "within", "collected", "after"]
