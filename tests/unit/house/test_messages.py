"""What a user reads after bad input stands in one file, to be read from top to bottom."""

from tests.helpers.messages import GOLDEN, sentences


def test_every_sentence_is_as_it_was_reviewed() -> None:
    """Other tests assert the value that is named and the option of the remedy, and no sentence."""
    written = "write the new sentences with: python -m tests.helpers.messages"
    assert sentences() == GOLDEN.read_text(encoding="utf-8"), written
