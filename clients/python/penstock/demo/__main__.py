"""`python -m penstock.demo`."""

from __future__ import annotations

import sys

from penstock.demo.command import main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
