"""Mistakes of the person at the keyboard: one sentence, no traceback."""


class UsageError(Exception):
    """Something the user can fix; the message is one sentence that says how."""
