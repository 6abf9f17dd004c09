"""Ready-made rewards: `penstock rollout --reward penstock.rewards:numeric`, and their composition.

Each function here returns a reward of (task, trajectory), and all its options have defaults. What is
imported from here is loaded when it is used. Uses `client` and `common`. Begin with `texts.py`.
"""

TYPE_CHECKING = False

if TYPE_CHECKING:
    from penstock.rewards.composition import weighted as weighted
    from penstock.rewards.mathematics import boxed as boxed
    from penstock.rewards.programs import unit_tests as unit_tests
    from penstock.rewards.texts import exact as exact
    from penstock.rewards.texts import format as format  # noqa: A004
    from penstock.rewards.texts import numeric as numeric
    from penstock.rewards.texts import regex as regex

MODULES = {
    "boxed": "mathematics",
    "exact": "texts",
    "format": "texts",
    "numeric": "texts",
    "regex": "texts",
    "unit_tests": "programs",
    "weighted": "composition",
}
"""The module of each function."""


def __getattr__(name: str) -> object:
    import importlib

    if name not in MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(MODULES)
