"""What a person did that cannot work, said once and without a traceback."""


class UserError(ValueError):
    """A refusal: the message names the flag, the numbers and the remedy. Commands print it and exit with code 2."""


class NothingToDo(UserError):
    """What was asked for is there already. Commands print the message and exit with code 0."""


class WriteError(RuntimeError):
    """A file that could not be written; the message names its path. Commands print it with the rank and exit with code 1."""


class BadImageError(RuntimeError):
    """An image that cannot be decoded; the message names its path. Commands print it with the rank and exit with code 1."""
