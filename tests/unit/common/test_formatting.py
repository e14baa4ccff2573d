"""Numbers and tables as people read them, and sizes as they write them."""

from __future__ import annotations

import pytest

from shardmlx.common.formatting import (
    columns,
    duration,
    gibibytes,
    long_duration,
    numbers_of,
    without_controls,
)
from shardmlx.common.units import BYTES, parse_bytes


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (64 << 30, "64.00 GiB"),
        (10**9, "0.93 GiB"),
        (0.1 * 2**30, "0.10 GiB"),
        (100 << 20, "100.0 MiB"),
        (100 << 10, "100.0 KiB"),
        (1024, "1.0 KiB"),
        (1023, "1023 B"),
        (0, "0 B"),
    ],
)
def test_memory_is_in_the_units_in_which_a_mac_is_sold(nbytes: float, text: str) -> None:
    assert gibibytes(nbytes) == text


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("64GiB", 64 << 30),
        ("64 gib", 64 << 30),
        ("64GB", 64 * 10**9),
        ("1.5 m", 1_500_000),
        ("512MiB", 512 << 20),
        ("0.5Ki", 512),
        ("3kB", 3000),
        ("7", 7),
        ("7 B", 7),
        ("1e3", 1000),
    ],
)
def test_units_of_memory_mean_what_they_say(text: str, nbytes: int) -> None:
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize(
    "text", ["", "GB", "-1GB", "12 apples", "1e999", "5Gbps", "nan", "1 G i B"]
)
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="give bytes"):
        parse_bytes(text)


@pytest.mark.parametrize("unit", BYTES)
def test_a_size_reads_the_same_on_the_command_line_and_in_a_hostfile(unit: str) -> None:
    assert parse_bytes(f"12{unit}") == 12 * BYTES[unit]


def test_columns_of_numbers_are_to_the_right() -> None:
    assert columns(("host", "seconds", "over"), [("a", "1.5", "en0"), ("bb", "12", "")]) == (
        "host  seconds  over\n"
        "a         1.5  en0\n"
        "bb         12"
    )  # fmt: skip


def test_a_table_is_never_cut_and_takes_nothing_for_markup() -> None:
    long = "[bold]" + 500 * "x" + ":smile:"
    assert columns(("a", "b"), [(long, "1")]) == f"a{' ' * len(long)} b\n{long}  1"
    assert columns(("a", "b"), []) == "a  b"


@pytest.mark.parametrize(("start", "stop", "text"), [(4, 10, "4-9"), (4, 5, "4")])
def test_layers_are_named_by_their_first_and_last(start: int, stop: int, text: str) -> None:
    assert numbers_of(start, stop) == text


def test_text_that_would_steer_a_terminal_is_shown() -> None:
    assert without_controls("a\x1b[2Jb\x9b1m\r\tc\nü") == "a\\x1b[2Jb\\x9b1m\\r\tc\nü"


@pytest.mark.parametrize(
    ("seconds", "short", "long"),
    [
        (0.0, "0 s", "0 s"),
        (0.00004567, "0.0457 ms", "0.000046 s"),
        (0.0201, "20.1 ms", "0.020 s"),
        (0.463, "0.463 s", "0.46 s"),
        (15.454, "15.5 s", "15 s"),
        (258.013, "258 s", "4.3 min"),
        (999.6, "1,000 s", "17 min"),
        (1490.2, "1,490 s", "25 min"),
        (129006.0, "129,000 s", "36 h"),
        (9e6, "9,000,000 s", "100 days"),
    ],
)
def test_seconds_are_written_as_people_write_them(seconds: float, short: str, long: str) -> None:
    assert (duration(seconds), long_duration(seconds)) == (short, long)
