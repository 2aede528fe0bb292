"""The one exception a user's mistake raises.

A message is a short lesson: what was asked, why it cannot work, the exact change to make. The command
line prints it without a traceback (``--debug`` shows one); Python callers can catch it.
"""


class LockstepError(Exception):
    """A mistake in what the user gave: input, configuration, files, environment."""


class NotRunError(LockstepError):
    """No mistake, but what this version only plans for: it does not run it."""
