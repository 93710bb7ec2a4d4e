"""The errors a user can cause or meet; each is one line and decides the exit code."""


class MimoEdgeError(Exception):
    """A failure that is nobody's input (disk full, backend failed). Exit code 1."""

    exit_code = 1


class BadInputError(MimoEdgeError):
    """What was given cannot be right: says what, the value, what is allowed, what to run next. Exit code 2."""

    exit_code = 2


class UnsupportedError(MimoEdgeError):
    """What was given may be right, but this version cannot do it. Exit code 3."""

    exit_code = 3
