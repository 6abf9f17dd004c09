"""Functions that were written for other systems, run unchanged: `penstock rollout --style`.

The module `styles` finds them; docs/moving.md says what each system's become.
"""
