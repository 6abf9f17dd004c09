"""The errors of a launch, and of a run that Python code started."""


class LaunchInvalid(Exception):
    """A run cannot be made of what is given; the message names the option, and what to do."""


class RunInvalid(ValueError):
    """No run can be made of the arguments; the message names the argument, and what to do."""


class RunFailed(Exception):
    """A run ended before its last step; the message says which part failed, with the end of its log."""
