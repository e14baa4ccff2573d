"""Exceptions that a user or a caller can meet."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

_LONGEST = 1500
"""Characters of a message: whoever reads it, reads it in a terminal."""


class UserError(ValueError):
    """Bad input. The message is one line that names the offending value and the remedy.

    A command that meets it prints that line on rank 0 and ends, on all ranks, with status 2.
    Whatever the offending value is, the line stays one, and readable: what does not print is
    escaped, and what is long left out in the middle.

    ``problem`` names the value, ``remedy`` says what to do; the message is both, with a colon
    between. Programs take the fields, and parse no message.
    """

    def __init__(self, problem: str, remedy: str = "") -> None:
        self.problem = _readable(problem)
        self.remedy = _readable(remedy)
        super().__init__(f"{self.problem}: {self.remedy}" if remedy else self.problem)

    def __reduce__(self) -> tuple[type[UserError], tuple[str, str]]:
        """Pickle both fields: an error of one rank is told to others."""
        return type(self), (self.problem, self.remedy)


class PromptTooLong(UserError):
    """A prompt of more tokens than it may have."""


@contextlib.contextmanager
def file_access(action: str, where: object, remedy: str = "") -> Iterator[None]:
    """Make an ``OSError`` of the block a ``UserError`` that it cannot ``action`` that file."""
    try:
        yield
    except OSError as error:
        raise UserError(f"cannot {action} {where}: {error.strerror or error}", remedy) from None


FAULTS = (
    ArithmeticError,
    AttributeError,
    LookupError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""Errors of a library's code that gets other things than it takes."""


@contextlib.contextmanager
def refusing(what: str, remedy: str = "") -> Iterator[None]:
    """Make any of ``FAULTS`` in the block a ``UserError``, which says ``what`` in front of it."""
    try:
        yield
    except UserError:
        raise
    except FAULTS as error:
        raise UserError(f"{what}: {one_line(error)}", remedy) from None


@contextlib.contextmanager
def naming(where: str) -> Iterator[None]:
    """Put ``where`` in front of the problem of a ``UserError`` in the block."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{where}: {error.problem}", error.remedy) from None


def unknown_token(where: str, token: int, vocabulary: int) -> UserError:
    """Return the error for a token id that is none of the model's: MLX would read, and in training
    write, memory that is not the model's."""
    return UserError(
        f"{where} has token {token}, and the model knows those from 0 to {vocabulary - 1}",
        "use the tokenizer that comes with the model",
    )


class Stopped(Exception):
    """A signal asked the run to stop, and all ranks leave in order, having saved what they had.

    The process ends with status 128 + ``signal``, as a shell counts.
    """

    def __init__(self, signal: int, message: str) -> None:
        super().__init__(message)
        self.signal = signal

    def __reduce__(self) -> tuple[type[Stopped], tuple[int, str]]:
        """Pickle both fields: the ranks of a job leave with the same error."""
        return type(self), (self.signal, str(self))


class EngineError(RuntimeError):
    """An action failed; the message names rank, host, stage, action, and the peer if it waited."""


class AgreedFailure(RuntimeError):
    """A failure that all ranks have found together, so that all leave in order: with status 1,
    after one line of rank 0."""


def _readable(text: str) -> str:
    """Return text that prints, on one line, and not too long."""
    if not text.isprintable():
        text = "".join(
            each if each.isprintable() else each.encode("unicode_escape").decode() for each in text
        )
    if len(text) > _LONGEST:
        text = f"{text[: _LONGEST // 2]} ... {text[-_LONGEST // 2 :]}"
    return text


LOCAL_NETWORK = (
    "on a Mac see Privacy & Security, Local Network, which hides hosts from tmux, launchd and apps"
)
"""Remedy where macOS hides other machines from an app; Apple's TN3179."""

KNOWN_FAILURES = (
    (
        "ImpactingInteractivity",  # github.com/ml-explore/mlx/issues/3267
        "macOS's GPU watchdog ended this work, to keep a display that is awake smooth",
        "let displays sleep (pmset displaysleepnow), give smaller micro-batches, or try "
        "AGX_RELAX_CDM_CTXSTORE_TIMEOUT=1",
    ),
    (
        "CallbackErrorOutOfMemory",  # github.com/ml-explore/mlx/issues/3317
        "the GPU has no memory left",
        "end other programs there, or give --micro-batch-size 1 or --recompute full",
    ),
    (
        "[metal::malloc] Resource limit",  # github.com/ml-explore/mlx/issues/4464
        "Metal's limit of buffers is reached, of which MLX keeps some for each length of a batch",
        "resume from the newest checkpoint, and give a smaller --max-seq-length",
    ),
    ("No route to host", "another machine cannot be reached", LOCAL_NETWORK),
)
"""Part of a message of MLX, macOS or MPI, what it means, and the remedy."""


def explained(text: str) -> str:
    """Return a message, and after it what it means if it is one of ``KNOWN_FAILURES``."""
    known = (f"{text} ({means}: {what})" for part, means, what in KNOWN_FAILURES if part in text)
    return next(known, text)


def one_line(error: BaseException) -> str:
    """Return what an exception says, on one line; its type if it says nothing."""
    # A KeyError shows its message in quotes.
    text = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
    return " ".join(text.split()) or type(error).__name__
