"""Functions named in the configuration: `pkg.module:function`."""

from __future__ import annotations

from collections.abc import Callable

from penstock.common.functions import find_function
from penstock.trainer.config.algorithm import CustomFunction
from penstock.trainer.core.errors import blaming


def load_function(config: CustomFunction, section: str) -> Callable[..., object]:
    """Returns the function that the section names. It must accept a batch, and the options by name.

    Raises ConfigInvalid, naming the section and the function.
    """
    with blaming(f"{section}.function {config.function}"):
        return find_function(config.function, ("batch",), config.options)
