"""The error of a launch."""


class LaunchInvalid(Exception):
    """A run cannot be made of what is given; the message names the option, and what to do."""
