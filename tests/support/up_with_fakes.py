"""`penstock up` with the fake engine's server: `python -m tests.support.up_with_fakes CONFIG
[--resume]`."""

from __future__ import annotations

import sys
from pathlib import Path

from penstock.up.up import Programs, up

# The options of the fake engine are none of vLLM's, which a check would say.
FAKES = Programs(serve=(sys.executable, "-m", "tests.support.fake_serve"), check=())

if __name__ == "__main__":
    config, *options = sys.argv[1:]
    sys.exit(up(Path(config), [], "--resume" in options, "--dry-run" in options, FAKES))
