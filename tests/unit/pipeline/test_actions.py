"""Actions: their letters, their words, and the stage at the other end of a message."""

import pytest

from shardmlx.pipeline.actions import Action, Kind


@pytest.mark.parametrize(
    ("kind", "text", "words", "neighbour"),
    [
        (Kind.SEND_F, "2SEND_F5", "the hidden states of micro-batch 5", 3),
        (Kind.RECV_B, "2RECV_B5", "the gradient of micro-batch 5", 3),
        (Kind.RECV_F, "2RECV_F5", "the hidden states of micro-batch 5", 1),
        (Kind.SEND_B, "2SEND_B5", "the gradient of micro-batch 5", 1),
    ],
)
def test_a_message_goes_to_the_next_stage_or_the_one_before(
    kind: Kind, text: str, words: str, neighbour: int
) -> None:
    action = Action(2, kind, 5)
    assert (str(action), action.words, action.neighbour) == (text, words, neighbour)


def test_work_is_named_by_what_it_computes() -> None:
    assert [Action(0, kind, 1).words for kind in (Kind.F, Kind.B, Kind.I, Kind.W)] == [
        "forward of micro-batch 1",
        "backward of micro-batch 1",
        "input gradient of micro-batch 1",
        "weight gradients of micro-batch 1",
    ]
