"""A user's mistake, told in one line."""


class UserError(ValueError):
    """One line naming file, field and remedy; the command line prints it and exits with code 2."""
