"""All checks of a machine, in the order in which `penstock doctor` shows them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from penstock.machine.findings import Finding
from penstock.machine.gpus import check_gpus, check_torch, gpu_count
from penstock.machine.models import cache_folder, check_models
from penstock.machine.packages import check_packages
from penstock.machine.processor import check_processor
from penstock.machine.resources import (
    check_disk,
    check_memory,
    check_open_files,
    check_ports,
    check_python,
    check_shared_memory,
)


def examine() -> Iterator[Finding]:
    gpus = gpu_count()
    yield check_python()
    yield from check_packages(gpus > 0)
    yield check_torch(gpus)
    yield check_processor(gpus > 0)
    yield check_gpus(gpus)
    yield check_memory()
    yield check_shared_memory()
    yield check_disk("disk", Path.cwd())
    yield check_disk("disk of models", cache_folder())
    yield check_open_files()
    yield check_ports()
    yield from check_models()
