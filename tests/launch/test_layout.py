"""How a run shares a machine."""

from __future__ import annotations

import pytest

from penstock.launch.errors import LaunchInvalid
from penstock.launch.layout import lay_out
from penstock.machine.devices import Machine
from penstock.machine.gpus import Gpu

GB = 10**9


def gpus(count: int, size: int = 80) -> Machine:
    gpu = Gpu("GPU", size * GB, size * GB, 9.0, "580")
    return Machine("16 cores", 200 * GB, (gpu,) * count, bfloat16=True)


def test_one_gpu_is_shared() -> None:
    layout = lay_out(gpus(1), 600_000_000, lora=False, ranks=None)
    assert (layout.ranks, layout.engines, layout.lora) == (1, 1, False)
    assert layout.engine_share == 0.5
    tight = lay_out(gpus(1), 3_000_000_000, lora=False, ranks=None)
    assert 0.1 < tight.engine_share < 0.35
    assert not tight.lora


def test_what_does_not_fit_is_trained_as_an_adapter_or_refused() -> None:
    large = lay_out(gpus(1), 7_000_000_000, lora=False, ranks=None)
    assert large.lora
    # The machine has no more than what both take together.
    assert 7e9 * 4 + 6e9 + large.engine_share * 80e9 <= 80e9
    with pytest.raises(LaunchInvalid, match=r"70\.0 billion parameters need about 426 GB on each"):
        lay_out(gpus(1), 70_000_000_000, lora=False, ranks=None)
    laptop = Machine("8 cores", 16 * GB)
    assert not lay_out(laptop, 500_000_000, lora=False, ranks=None).lora
    assert lay_out(laptop, 1_000_000_000, lora=False, ranks=None).lora
    with pytest.raises(LaunchInvalid, match="GB of memory even with an adapter"):
        lay_out(laptop, 7_000_000_000, lora=False, ranks=None)


@pytest.mark.parametrize(
    ("count", "ranks", "wanted"), [(2, None, (1, 1)), (8, None, (4, 4)), (8, 2, (2, 6)), (3, None, (1, 2))]
)  # fmt: skip
def test_several_gpus_are_divided(count: int, ranks: int | None, wanted: tuple[int, int]) -> None:
    layout = lay_out(gpus(count), 1_000_000_000, lora=False, ranks=ranks)
    assert (layout.ranks, layout.engines) == wanted
    assert layout.engine_share == 0
    assert lay_out(gpus(count), 1_000_000_000, lora=True, ranks=ranks).lora


def test_more_ranks_than_gpus_are_refused() -> None:
    with pytest.raises(LaunchInvalid, match=r"--ranks 2: of 2 GPUs, one has to serve the model"):
        lay_out(gpus(2), 10**9, lora=False, ranks=2)
    with pytest.raises(LaunchInvalid, match=r"--ranks 2"):
        lay_out(gpus(1), 10**9, lora=False, ranks=2)
    assert lay_out(Machine("8 cores", 64 * GB), 10**9, lora=False, ranks=2).ranks == 2
