"""What every room of the trainer may need: errors, figures, the thread that computes, ranks together.

Uses no other room of the trainer. Begin with `errors.py`.
"""
