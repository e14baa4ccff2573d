"""Exceptions that are no faults of the program: what the user can mend, and what he asked for."""

_LONGEST = 1500
"""Characters of a message: whoever reads it, reads it in a terminal."""


class UserError(ValueError):
    """Bad input. The message is one line that names the offending value and the remedy.

    A command that meets it prints that line on rank 0 and ends, on all ranks, with status 2.
    Whatever the offending value is, the line stays one, and readable: what does not print is
    escaped, and what is long left out in the middle.
    """

    def __init__(self, message: str) -> None:
        if not message.isprintable():
            message = "".join(
                each if each.isprintable() else each.encode("unicode_escape").decode()
                for each in message
            )
        if len(message) > _LONGEST:
            message = f"{message[: _LONGEST // 2]} ... {message[-_LONGEST // 2 :]}"
        super().__init__(message)


class Stopped(Exception):
    """A signal asked the run to stop, and all ranks leave in order, having saved what they had.

    The process ends with status 128 + ``signal``, as a shell counts.
    """

    def __init__(self, signal: int, message: str) -> None:
        super().__init__(message)
        self.signal = signal


class AgreedFailure(RuntimeError):
    """A failure that all ranks have found together, so that all leave in order: with status 1,
    after one line of rank 0."""


def one_line(error: BaseException) -> str:
    """What an exception says, on one line; its type if it says nothing."""
    # A KeyError shows its message in quotes.
    text = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
    return " ".join(text.split()) or type(error).__name__
