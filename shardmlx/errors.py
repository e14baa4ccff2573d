"""Exceptions that are no faults of the program: what the user can mend, and what he asked for."""


class UserError(ValueError):
    """Bad input. The message is one line that names the offending value and the remedy.

    A command that meets it prints that line on rank 0 and ends, on all ranks, with status 2.
    """


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
