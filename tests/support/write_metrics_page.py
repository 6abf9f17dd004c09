"""Updates the table of figures on its page: `python -m tests.support.write_metrics_page`."""

from __future__ import annotations

from pathlib import Path

from penstock.trainer.core.figures import MOMENT
from penstock.trainer.metrics.step_record import FIGURES

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "metrics.md"
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


def with_table(page: str) -> str:
    """The page with an up-to-date table."""
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}{table()}{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text()))
