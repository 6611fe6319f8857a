"""The one exception whose message is written for the user."""


class UserError(Exception):
    """Bad input: the command line prints the message alone, without a traceback, and exits with status 2."""
