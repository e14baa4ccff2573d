"""The one exception that is the user's to mend."""


class UserError(ValueError):
    """Bad input. The message is one line that names the offending value and the remedy.

    A command that meets it prints that line on rank 0 and ends, on all ranks, with status 2.
    """


def one_line(error: BaseException) -> str:
    """What an exception says, on one line; its type if it says nothing."""
    # A KeyError shows its message in quotes.
    text = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
    return " ".join(text.split()) or type(error).__name__
