"""docs/reference/metrics.md: its table of figures is generated, the text around it is not."""

from __future__ import annotations

from pathlib import Path

from penstock.trainer.core.figures import MOMENT
from penstock.trainer.metrics.step_record import FIGURES

BEGIN, END = "<!-- figures: begin -->\n", "<!-- figures: end -->\n"


def table() -> str:
    """The declared figures as a Markdown table, in the order of `metrics.jsonl`."""
    rows = ["| figure | unit | over several steps | |", "|---|---|---|---|"]
    for each in FIGURES:
        name = f"`{each.name}`" + (" by key" if each.is_breakdown else "")
        rule = f"{each.rule}" + (", not sent" if each.unit == MOMENT else "")
        description = each.description.replace("|", "\\|")
        rows.append(f"| {name} | {each.unit} | {rule} | {description} |")
    return "\n".join(rows) + "\n"


def page(path: Path) -> str:
    """The page with an up-to-date table."""
    before, rest = path.read_text().split(BEGIN)
    return f"{before}{BEGIN}{table()}{END}{rest.split(END)[1]}"
