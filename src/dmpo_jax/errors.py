"""The one error a user can cause."""


class UserError(ValueError):
    """Bad usage, configuration or data; the command line prints it as one line and exits with 2."""
