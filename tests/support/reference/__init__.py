"""Writes the generated pages of docs/reference/ from the sources; `make reference` runs it.

Begin with `pages.py`, which lists the pages. Every text on them is a docstring, a help text or a comment of
the product, except for the openings and the tables in `environment.py`.
"""
