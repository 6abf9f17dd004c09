"""`penstock up` with the fake engine's server: `python -m tests.support.up_with_fakes CONFIG
[--resume]`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from penstock.up.cast import Programs
from penstock.up.up import up
from tests.support.forked_command import NURSERY

FAKE_SERVE = (sys.executable, "-m", "tests.support.fake_serve")
FORKED = (sys.executable, "-m", "tests.support.forked_command")


def programs() -> Programs:
    """Trainer and hub are forked if the variable names a nursery."""
    # The options of the fake engine are none of vLLM's, which a check would say.
    if NURSERY not in os.environ:
        return Programs(serve=FAKE_SERVE, check=())
    return Programs(serve=FAKE_SERVE, train=(*FORKED, "train"), hub=(*FORKED, "serve"), check=())


if __name__ == "__main__":
    config, *options = sys.argv[1:]
    sys.exit(up(Path(config), [], "--resume" in options, "--dry-run" in options, programs()))
