"""Standard input that is passed on with its end."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import threading

import pytest

from shardmlx.common.passed_stdin import MARK, StdinReader
from shardmlx.errors import UserError

PROGRAM = """
import subprocess, sys
from shardmlx.common.passed_stdin import pass_stdin_on
pass_stdin_on(whole=WHOLE)
child = "from shardmlx.common.passed_stdin import StdinReader as R; import sys; r = R()\\n"
child += "while b := r.read(): sys.stdout.buffer.write(b); sys.stdout.buffer.flush()\\n"
child += "assert r.tells_end"
subprocess.run([sys.executable, "-c", child], check=True)
"""


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("text", [b"", b"a\n", MARK + bytes(20), bytes(range(256)) * 4000], ids=len)
def test_any_bytes_and_their_end_reach_a_child(text: bytes, whole: bool) -> None:
    program = PROGRAM.replace("WHOLE", str(whole))
    done = subprocess.run(
        [sys.executable, "-c", program], input=text, capture_output=True, check=True, timeout=60
    )
    assert done.stdout == text


def test_it_is_passed_on_as_it_comes() -> None:
    program = PROGRAM.replace("WHOLE", "False")
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for part in (b"one", b"two"):
            process.stdin.write(part)
            assert process.stdout.read(3) == part
        process.stdin.close()
        assert process.wait(60) == 0


def read_all(parts: list[bytes]) -> tuple[bytes, bool]:
    """What a reader makes of parts that come one after the other, and whether it knows an end."""
    read, write = os.pipe()

    def feed() -> None:
        for part in parts:
            os.write(write, part)
        os.close(write)

    thread = threading.Thread(target=feed)
    thread.start()
    reader, found = StdinReader(read), b""
    while piece := reader.read():
        found += piece
    assert reader.read(0.0) == b""
    thread.join()
    os.close(read)
    return found, reader.tells_end


@pytest.mark.parametrize("text", [b"", b"a", b"\0", MARK[:-1], b"\0shard\0", b"longer\0than it"])
def test_a_text_that_begins_like_the_mark_is_a_text(text: bytes) -> None:
    assert read_all([text[i : i + 1] for i in range(len(text))]) == (text, False)


def test_pieces_come_whole_in_whatever_parts() -> None:
    sent = MARK + (5).to_bytes(8) + b"hello" + (1).to_bytes(8) + b"!" + bytes(8)
    assert read_all([sent]) == (b"hello!", True)
    assert read_all([sent[i : i + 1] for i in range(len(sent))]) == (b"hello!", True)


@pytest.mark.parametrize("sent", [MARK, MARK + (5).to_bytes(8) + b"hel"], ids=len)
def test_one_that_breaks_off_has_not_ended(sent: bytes) -> None:
    """Where launch is killed, a part is not taken for the whole."""
    read, write = os.pipe()
    os.write(write, sent)
    os.close(write)
    with pytest.raises(UserError, match="breaks off"):
        StdinReader(read).read()
    os.close(read)


def test_a_closed_stdin_has_ended() -> None:
    """Whatever file has its number now."""
    program = (
        "import socket; from shardmlx.common.passed_stdin import StdinReader\n"
        "pair = socket.socketpair(); assert pair[0].fileno() == 0\n"
        "assert StdinReader().read() == b''"
    )
    command = f"exec {shlex.quote(sys.executable)} -c {shlex.quote(program)} <&-"
    subprocess.run(["sh", "-c", command], check=True, timeout=60)


def test_one_that_cannot_be_read_is_refused() -> None:
    program = (
        "from shardmlx.common.passed_stdin import pass_stdin_on; from shardmlx.errors import *\n"
        "try: pass_stdin_on(whole=True)\n"
        "except UserError as error: print(error.problem)"
    )
    command = f"exec {shlex.quote(sys.executable)} -c {shlex.quote(program)} <&-"
    done = subprocess.run(
        ["sh", "-c", command], check=True, timeout=60, capture_output=True, text=True
    )
    assert done.stdout.startswith("cannot read stdin")


def test_a_fault_on_the_way_is_said_and_ends_it() -> None:
    """Of a directory, say: a child must not wait for ever."""
    opened = "import os; os.dup2(os.open('/', os.O_RDONLY), 0)\n"
    done = subprocess.run(
        [sys.executable, "-c", opened + PROGRAM.replace("WHOLE", "False")],
        capture_output=True,
        check=True,
        timeout=60,
        text=True,
    )
    assert done.stdout == ""
    assert "cannot read stdin: Is a directory" in done.stderr


def test_silence_is_no_end() -> None:
    read, write = os.pipe()
    reader = StdinReader(read)
    assert reader.read(0.01) is None
    os.write(write, b"a")
    assert reader.read(0.01) == b"a"
    assert reader.read(0.01) is None
    os.close(write)
    assert reader.read(0.01) == b""
    os.close(read)
