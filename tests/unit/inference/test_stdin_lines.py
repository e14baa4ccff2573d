"""Lines as somebody types them."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from shardmlx.inference import stdin_lines
from shardmlx.inference.stdin_lines import TypedLines


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    for end in ends:
        try:
            os.close(end)
        except OSError:
            continue  # the test has closed it


def test_lines_come_whole_and_in_order(pipe: tuple[int, int]) -> None:
    lines = TypedLines(pipe[0], ends_in_silence=False)
    assert lines.next(0.01) is None
    os.write(pipe[1], b"one\r\ntwo\nthr")
    assert [lines.next(1.0), lines.next(1.0), lines.next(0.01)] == ["one", "two", None]
    os.write(pipe[1], "ée\n".encode())
    assert lines.next(1.0) == "thrée"
    assert lines.is_open


def test_the_end_gives_out_what_was_begun(pipe: tuple[int, int]) -> None:
    lines = TypedLines(pipe[0], ends_in_silence=False)
    os.write(pipe[1], b"last")
    os.close(pipe[1])
    assert lines.next(1.0) == "last"
    assert not lines.is_open
    assert lines.next(1.0) is None


def test_on_a_pipe_silence_is_the_end(
    pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stdin_lines, "SECONDS_OF_SILENCE", 0.05)
    lines = TypedLines(pipe[0], ends_in_silence=True)
    os.write(pipe[1], b"one\n")
    assert lines.next(1.0) == "one"
    for _ in range(20):
        assert lines.next(0.02) is None
    assert not lines.is_open


def test_an_empty_line_interrupts_and_others_wait(pipe: tuple[int, int]) -> None:
    lines = TypedLines(pipe[0], ends_in_silence=False)
    assert not lines.interrupts()
    os.write(pipe[1], b"\n")
    assert lines.interrupts()
    os.write(pipe[1], b"next\n")
    assert not lines.interrupts()
    os.write(pipe[1], b"\n")
    assert lines.interrupts()
    assert lines.next(1.0) == "next"
    assert lines.next(0.01) is None
