"""Command lines made from options: old names, lists, switches, and what must be given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import pytest

from shardmlx import plan
from shardmlx.common.environment import LAUNCHED
from shardmlx.config.command_line import build_parser, load_given_options, load_options, words_of
from shardmlx.config.inspect import read_options as read_inspect_options
from shardmlx.config.launch import read_flags
from shardmlx.config.options import REQUIRED, OptionError, check_options, option
from shardmlx.config.train import load_config
from shardmlx.errors import UserError

Capture = pytest.CaptureFixture[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Options of each kind."""

    place: str = option(REQUIRED, "where", metavar="DIR", positional=True)
    weight: float = option(REQUIRED, "how much", metavar="KILOGRAMS", above=0)
    config: str | None = option(None, "a file", metavar="FILE")
    speed: int | None = option(None, "how fast", unset="chosen: the fastest", old=("--pace",))
    loud: bool = option(True, "make noise", takes_value=True)
    dry: bool = option(False, "leave it")
    each: Sequence[str] = option([], "once for each", metavar="NAME", one_each=True)
    many: Sequence[str] = option([], "several", metavar="NAME")

    def __post_init__(self) -> None:
        check_options(self)
        if self.place == "nowhere":
            raise OptionError("place", "is 'nowhere'", "name another")


def read(*words: str, rank: int = 0) -> Sample:
    return load_options(Sample, build_parser(Sample, "sample", "", rank=rank), words, rank)


def error_of(*words: str) -> str:
    with pytest.raises(UserError) as error:
        read(*words)
    return str(error.value)


# Old names


def test_an_old_flag_is_understood_and_the_new_name_said_once(capsys: Capture) -> None:
    assert read("here", "--weight", "2", "--pace", "3").speed == 3
    assert capsys.readouterr().err == (
        "shardmlx: --pace is called --speed now: the old name goes with the next release\n"
    )


def test_an_old_key_is_understood_and_the_new_name_said_once(
    tmp_path: Path, capsys: Capture
) -> None:
    file = tmp_path / "sample.yaml"
    file.write_text("pace: 3\n")
    assert read("here", "--weight", "2", "--config", str(file)).speed == 3
    assert capsys.readouterr().err == (
        f"shardmlx: {file}: pace is called speed now: the old name goes with the next release\n"
    )
    file.write_text("pace: 3\nspeed: 4\n")
    assert error_of("here", "--config", str(file)) == (
        f"{file} has both pace and speed: take pace out"
    )


def test_other_ranks_and_the_job_of_a_launch_say_nothing_of_it(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    read("here", "--weight", "2", "--pace", "3", rank=1)
    monkeypatch.setenv(LAUNCHED, "mark")
    read("here", "--weight", "2", "--pace", "3")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("old", "new"), [("--hosts", "--hostfile"), ("--stages", "--pipeline-stages")]
)
def test_commands_still_take_the_names_that_they_had(old: str, new: str, capsys: Capture) -> None:
    value = "2"
    options = read_inspect_options(["MODEL", old, value])
    assert value in (options.hostfile, str(options.pipeline_stages))
    assert f"{old} is called {new} now" in capsys.readouterr().err


def test_train_and_launch_still_take_the_names_that_they_had(
    tmp_path: Path, capsys: Capture
) -> None:
    file = tmp_path / "lora.yaml"
    file.write_text("hosts: macs\n")
    assert load_config(["-c", str(file)]).hostfile == "macs"
    assert load_config(["--hosts", "macs"]).hostfile == "macs"
    flags, command, words = read_flags(["-n", "2", "--ssh", "login", "profile", "x"])
    assert (flags.agent, command, words) == ("login", "profile", ("x",))
    assert capsys.readouterr().err.count("is called") == 3


def test_plan_still_shows_schedules(capsys: Capture) -> None:
    assert plan.main(["--pipeline-stages", "2", "--micro-batches", "2", "--print", "actions"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "r0 0F0 0F1 0B0 0B1\nr1 1F0 1B0 1F1 1B1\n"
    assert captured.err == "shardmlx: schedules are shown by shardmlx schedule now\n"


# What is given


def test_lists_are_given_by_repeating_the_flag_or_in_a_row() -> None:
    sample = read("here", "--weight", "2", "--each", "a", "--each", "b", "--many", "c", "d")
    assert (sample.each, sample.many) == (["a", "b"], ["c", "d"])


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
    assert error_of("--weight", "2") == (
        "the following arguments are required: DIR: see shardmlx sample --help"
    )
    assert error_of("here") == "--weight is missing: see shardmlx sample --help"
    assert error_of("nowhere", "--weight", "2") == "DIR is 'nowhere': name another"


def test_an_unknown_flag_gets_a_suggestion_that_can_be_typed() -> None:
    assert error_of("here", "--weigth", "2") == (
        "unknown argument '--weigth': did you mean --weight?"
    )


def test_flags_can_be_written_as_words_again() -> None:
    words = ["here", "--weight", "2", "--no-loud", "--dry", "--each", "a", "--many", "c", "d"]
    _, given = load_given_options(Sample, build_parser(Sample, "sample", ""), words)
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
    assert "--pace" not in text
