"""Lets this process use AMX; imported in vLLM's worker process before it computes.

Linux ends a process that touches the tile registers without having asked for them (SIGILL). vLLM's
attention touches them for bfloat16 without asking. Usually a matrix product of oneDNN has asked before, but
not for a model so small that none of its products is worth tiles.
"""

from __future__ import annotations

import torch

if torch.cpu._is_amx_tile_supported():  # pyright: ignore[reportPrivateUsage]
    torch.cpu._init_amx()  # pyright: ignore[reportPrivateUsage]
