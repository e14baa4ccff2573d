"""Lines that come through a pipe."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from shardmlx.common.passed_stdin import MARK
from shardmlx.inference import chat_input
from shardmlx.inference.chat_input import PipedLines


@pytest.fixture
def pipe(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[int, int]]:
    """A pipe that is looked at every 10 ms."""
    monkeypatch.setattr(chat_input, "SECONDS_BETWEEN_CALLS", 0.01)
    read, write = os.pipe()
    with os.fdopen(read), os.fdopen(write):
        yield read, write


def test_lines_come_whole_and_in_order_and_the_end_ends_the_last(pipe: tuple[int, int]) -> None:
    lines = PipedLines(pipe[0], ends_in_silence=False)
    calls: list[bytes] = [b"one\r\ntwo\nthr", "ée\nlast".encode()]

    def type_more() -> None:
        if calls:
            os.write(pipe[1], calls.pop(0))
        else:
            os.dup2(os.open(os.devnull, os.O_WRONLY), pipe[1])

    typed = [lines.ask(type_more) for _ in range(5)]
    assert typed == ["one", "two", "thrée", "last", None]


def test_a_line_that_is_no_text_is_named_and_passed_over(
    pipe: tuple[int, int], capfd: pytest.CaptureFixture[str]
) -> None:
    """The model would be asked something else."""
    lines = PipedLines(pipe[0], ends_in_silence=False)
    os.write(pipe[1], b"caf\xe9\nthere\nth\xffe\nend\r")
    os.dup2(os.open(os.devnull, os.O_WRONLY), pipe[1])
    assert [lines.ask(lambda: None) for _ in range(3)] == ["there", "end", None]
    said = capfd.readouterr().err.splitlines()
    assert ["caf\ufffd" in said[0], "th\ufffde" in said[1], len(said)] == [True, True, 2]


def test_on_a_pipe_silence_is_the_end(
    pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_input, "SECONDS_OF_SILENCE", 0.05)
    lines = PipedLines(pipe[0], ends_in_silence=True)
    os.write(pipe[1], b"one\ntwo")
    assert [lines.ask(lambda: None) for _ in range(3)] == ["one", "two", None]


def test_silence_is_no_end_where_launch_passes_it_on(
    pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_input, "SECONDS_OF_SILENCE", 0.05)
    lines = PipedLines(pipe[0], ends_in_silence=True)
    os.write(pipe[1], MARK + (6).to_bytes(8) + b"one\ntw")
    calls: list[None] = []

    def go_on() -> None:
        calls.append(None)
        if len(calls) == 20:  # of 10 ms each
            os.write(pipe[1], (1).to_bytes(8) + b"o" + bytes(8))

    assert [lines.ask(go_on) for _ in range(3)] == ["one", "two", None]
    assert len(calls) >= 20


def test_lines_of_a_file_wait_and_an_empty_one_interrupts_nothing(pipe: tuple[int, int]) -> None:
    for begin in (b"", MARK + (11).to_bytes(8)):  # launch passes them on in pieces
        lines = PipedLines(pipe[0], ends_in_silence=False, typed=None if begin == b"" else True)
        os.write(pipe[1], begin + b"one\n\n\ntwo\n\n")
        assert not lines.interrupts()
        assert [lines.ask(lambda: None) for _ in range(5)] == ["one", "", "", "two", ""]
    assert "Enter" not in PipedLines(pipe[0]).help
    assert "Enter" in PipedLines(pipe[0], typed=True).help


def test_an_empty_line_that_is_typed_interrupts_and_others_wait(pipe: tuple[int, int]) -> None:
    lines = PipedLines(pipe[0], ends_in_silence=False, typed=True)
    assert not lines.interrupts()
    os.write(pipe[1], b"\n")
    assert lines.interrupts()
    os.write(pipe[1], b"next\n")
    assert not lines.interrupts()
    os.write(pipe[1], b"\n")
    assert lines.interrupts()
    assert lines.ask(lambda: None) == "next"
