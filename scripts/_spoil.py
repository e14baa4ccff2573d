"""Change a text file at random, for fuzz.py."""

from __future__ import annotations

import re
from random import Random

_BOMB = ", ".join(
    ["&b0 [lol, lol, lol, lol, lol, lol, lol, lol, lol]"]
    + [f"&b{i} [{', '.join([f'*b{i - 1}'] * 9)}]" for i in range(1, 10)]
)

NASTY = (
    "", "0", "-1", "1", "2", "3.5", "-0.0", "1e999", "-1e999", "1e-400", "nan", "NaN", "Infinity",
    ".nan", ".inf", "-.inf", "inf", "9" * 19, "9" * 400, "9" * 5000, "0x" + "f" * 5000, "0b1",
    "0o17",
    "4294967296", "9223372036854775808", "1e30", "1:2:3", "1_000", "true", "no", "null", "~",
    "None",
    "''", '""', "[]", "{}", "[[]]", "[{}]", "{a: 1}", '{"a": 1}', '{"a": 1, "a": 2}', "[1, 2]",
    '["a"]',
    "[" * 3000, "{a: " * 1000, '{"a":' * 3000, "[" * 900 + "]" * 900, "- " * 2000, "? " * 1000,
    "!" * 500, "&a [*a]", "&a {k: *a}", "*missing", f"[{_BOMB}]", f"{{a: [{_BOMB}]}}",
    "!!python/object/apply:os.system [echo]", "!!binary '%%%'", "!!binary aGVsbG8=",
    "!!timestamp x",
    "!!timestamp 1", "!!bool maybe", "!!int ''", "!!int x", "!!float x", "!!float ''", "!!null x",
    "!!set {a, b}", "!!set {[a]}", "!!omap [a: 1]", "!!omap [1]", "!!pairs [a: 1]", "!!map [a]",
    "!!seq {a: 1}", "!!str [a]", "!!merge x", "!mine x", "!<x> y", "2024-02-30", "2024-01-01",
    "9999-12-31 23:59:59 -23:59", "0001-01-01 00:00:00 +23:59", "<<: 1", "<<: *a", "? [a]",
    "? {a: b}",
    "=", "|", ">", "%YAML 9.9", "---", "...", "'open", '"open', "@", "`", "\t", "a: b: c", "# x",
    "//",
    '"\\ud800"', '"\\u0000"', '"\\n"', "\0", "\x1b[31m", "\x7f", "\x85", "\u2028", "\ufeff", "é",
    "😀",
    "x" * 5000, "'" + "y\\n" * 2000 + "'", '"../../etc/passwd"', "slots=99999999999",
    "memory=1e300TiB",
    "memory=-1GiB", "flops=nanT", "slots=0", "kind=", "a=b=c", "F32", "BF16", "lora", "full",
    "rank",
)  # fmt: skip

_TOKEN = re.compile(
    rb"\"[^\"\n]*\"|'[^'\n]*'|-?\d[\d.eE+-]*|[\w./-]+|\[[^\[\]]*\]|\{[^{}]*\}|[:,=#{}\[\]\-]"
)


def nasty(random: Random) -> bytes:
    """Return one of the ``NASTY`` values."""
    return random.choice(NASTY).encode("utf-8", "surrogatepass")


def swap_value(text: bytes, random: Random) -> bytes:
    """Replace a token by another one, or by a nasty value."""
    tokens = list(_TOKEN.finditer(text))
    if not tokens:
        return nasty(random)
    token = random.choice(tokens)
    other = random.choice(tokens).group() if random.random() < 0.3 else nasty(random)
    return text[: token.start()] + other + text[token.end() :]


def change_number(text: bytes, random: Random) -> bytes:
    """Replace a number by another, which may be valid."""
    numbers = list(re.finditer(rb"\d+", text))
    if not numbers:
        return text
    number = random.choice(numbers)
    value = int(number.group()[:20])
    near = random.choice(
        [0, 1, 2, value + 1, value - 1, -value, 2 * value, 1000 * value, value / 2]
    )
    return text[: number.start()] + str(near).encode() + text[number.end() :]


def insert(text: bytes, random: Random) -> bytes:
    """Insert a nasty value anywhere."""
    at = random.randrange(len(text) + 1)
    return text[:at] + nasty(random) + text[at:]


def flip(text: bytes, random: Random) -> bytes:
    """Flip one to four bits."""
    spoiled = bytearray(text)
    for _ in range(random.randint(1, 4) if text else 0):
        spoiled[random.randrange(len(spoiled))] ^= 1 << random.randrange(8)
    return bytes(spoiled)


def cut(text: bytes, random: Random) -> bytes:
    """Cut off the end."""
    return text[: random.randrange(len(text) + 1)]


def take_out(text: bytes, random: Random) -> bytes:
    """Remove up to 20 bytes."""
    start = random.randrange(len(text) + 1)
    return text[:start] + text[start + random.randint(1, 20) :]


def change_lines(text: bytes, random: Random) -> bytes:
    """Insert a copy of a line, with its key, somewhere; it may be indented and lack its end."""
    lines = text.splitlines(keepends=True) or [b""]
    line = random.choice(lines)
    if random.random() < 0.4:
        line = b" " * random.randint(1, 4) + line.strip()
    lines.insert(random.randrange(len(lines) + 1), line)
    return b"".join(lines)


def add_key(text: bytes, random: Random) -> bytes:
    """Add an unknown key with a nasty value."""
    value = nasty(random)
    if text.lstrip().startswith(b"{"):
        return text.replace(b"{", b'{"unknown": ' + value + b", ", random.randint(1, 3))
    return text + b"\nunknown: " + value + b"\n"


def respell(text: bytes, random: Random) -> bytes:
    """Change line ends, encoding, spaces or letters, double the text, or empty it."""
    return random.choice(
        [
            text.replace(b"\n", b"\r\n"),
            text.replace(b"\n", b"\r"),
            b"\xef\xbb\xbf" + text,
            text.decode("utf-8", "replace").encode("utf-16"),
            text.replace(b" ", b"\t"),
            text.replace(b"o", b"\xff\xfe"),
            text.replace(b"a", b"\xed\xa0\x80", 1),
            text * 2,
            text.upper(),
            b"",
        ]
    )


MUTATIONS = (
    swap_value, swap_value, change_number, change_number, insert, flip, cut, take_out,
    change_lines, add_key, respell,
)  # fmt: skip
