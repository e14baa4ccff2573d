"""Command lines made from options: lists, switches, and what must be given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import pytest

from shardmlx.config.command_line import CommandLine, words_of
from shardmlx.config.inference import GENERATE
from shardmlx.config.options import REQUIRED, OptionError, Options, option
from shardmlx.errors import UserError
from shardmlx.main import main
from tests.helpers.refusals import refusal

Capture = pytest.CaptureFixture[str]


@dataclass(frozen=True, kw_only=True)
class Sample(Options):
    """Options of each kind."""

    place: str = option(REQUIRED, "where", metavar="DIR", positional=True)
    weight: float = option(REQUIRED, "how much", metavar="KILOGRAMS", above=0)
    config: str | None = option(None, "a file", metavar="FILE")
    speed: int | None = option(None, "how fast", unset="chosen: the fastest")
    loud: bool = option(True, "make noise", takes_value=True)
    dry: bool = option(False, "leave it")
    many: Sequence[str] = option([], "several", metavar="NAME")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.place == "nowhere":
            raise OptionError("place", "is 'nowhere'", "name another")


SAMPLE = CommandLine(options=Sample, command="report", description="")


def read(*words: str, rank: int = 0) -> Sample:
    return SAMPLE.load(words, rank)


def test_an_unknown_flag_before_a_command_is_named(capsys: Capture) -> None:
    assert main(["launch", "--sh", "login", "train"]) == 2
    assert "unknown argument '--sh'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        ("plan m --loss-chunk off", "write loss_chunk into the YAML file: -c FILE"),
        ("launch -n 2 train --keep-checkpoints 3", "write keep_checkpoints into the YAML file"),
    ],
)
def test_a_flag_for_what_is_in_the_file_only_is_refused_with_its_key(
    words: str, remedy: str, capsys: Capture
) -> None:
    assert main(words.split()) == 2
    said = capsys.readouterr().err
    assert (remedy in said, said.count("\n")) == (True, 1)


def test_lists_are_given_by_repeating_the_flag_or_in_a_row() -> None:
    sample = read("here", "--weight", "2", "--many", "c", "--many", "d", "e")
    assert sample.many == ["c", "d", "e"]


@pytest.mark.parametrize(
    ("words", "loud"),
    [
        ([], True),
        (["--loud"], True),
        (["--no-loud"], False),
        (["--loud", "False"], False),
        (["--loud", "f"], False),
        (["--loud", "T"], True),
    ],
)
def test_a_switch_may_take_the_words_of_mlx_lm(words: list[str], loud: bool) -> None:
    assert read("here", "--weight", "2", *words).loud is loud


def test_what_must_be_given_is_named() -> None:
    assert str(refusal(read, "--weight", "2")) == (
        "the following arguments are required: DIR: see shardmlx report --help"
    )
    assert str(refusal(read, "here")) == "--weight is missing: see shardmlx report --help"
    assert str(refusal(read, "nowhere", "--weight", "2")) == "DIR is 'nowhere': name another"


def test_an_unknown_flag_gets_a_suggestion_that_can_be_typed() -> None:
    assert str(refusal(read, "here", "--weigth", "2")) == (
        "unknown argument '--weigth': did you mean --weight?"
    )


def test_ranks_read_no_file_that_is_stdin(tmp_path: Path) -> None:
    """They would wait for its end for ever. Without mpirun it can be read."""
    path = tmp_path / "options.yaml"
    path.write_text("prompts: /dev/fd/0\n")
    for words in (["--prompts", "/dev/stdin"], ["-c", str(path)], ["-c", "/dev/stdin"]):
        with pytest.raises(UserError, match=r"/dev/(stdin|fd/0): ranks are not told where stdin"):
            GENERATE.load_given(words, on_ranks=True)
    assert GENERATE.load_given(["--prompts", "/dev/stdin"])[0].prompts == "/dev/stdin"
    assert GENERATE.load_given(["-c", str(path)])[0].prompts == "/dev/fd/0"


def test_flags_can_be_written_as_words_again() -> None:
    words = ["here", "--weight", "2", "--no-loud", "--dry", "--many", "c", "d"]
    _, given = SAMPLE.load_given(words)
    written = words_of(Sample, given.flags)
    assert written == ["--place", *words[:2], "2.0", *words[3:]]
    assert {each.name for each in fields(Sample)} - given.names == {"config", "speed"}


def test_help_shows_unit_and_default_or_by_what_rule_it_is_chosen(capsys: Capture) -> None:
    with pytest.raises(SystemExit):
        read("--help")
    text = " ".join(capsys.readouterr().out.split())
    assert "--weight KILOGRAMS how much" in text
    assert "--speed N how fast (default: chosen: the fastest)" in text
    assert "--dry, --no-dry leave it (default: off)" in text
