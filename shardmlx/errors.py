"""The one exception that is the user's to mend."""


class UserError(ValueError):
    """Bad input. The message is one line that names the offending value and the remedy.

    A command that meets it prints that line on rank 0 and ends, on all ranks, with status 2.
    """
