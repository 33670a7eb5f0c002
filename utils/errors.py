"""The one error class whose message is meant for the user; anything else that escapes is a bug and keeps its traceback."""


class UserError(Exception):
    """Something the user can mend: the message says what is wrong, where, and what to do."""
