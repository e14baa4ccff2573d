"""What a message to the user looks like, whatever is in it."""

from shardmlx.errors import UserError


def test_a_message_stays_one_line_that_can_be_printed() -> None:
    assert str(UserError("key 'a\nb\x1b[31m\x7f\u2028': é 😀")) == (
        r"key 'a\nb\x1b[31m\x7f\u2028': é 😀"
    )


def test_a_long_value_is_left_out_in_the_middle_so_that_the_remedy_stays() -> None:
    message = str(UserError(f"--name is {'x' * 100_000}: give less"))
    assert message.startswith("--name is xxx")
    assert message.endswith("xxx: give less")
    assert " ... " in message
    assert len(message) < 1600
