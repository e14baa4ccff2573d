"""``shardmlx COMMAND``: the first screen, and what runs which command."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from shardmlx.config.commands import BY_NAME, COMMANDS, OF_RANKS, Command
from shardmlx.config.options import written
from shardmlx.main import main

ROOT = Path(__file__).parents[3]

Capture = pytest.CaptureFixture[str]


def test_the_first_screen_fits_a_terminal_and_names_every_command(capsys: Capture) -> None:
    assert main(["--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 23  # a prompt is the 24th
    assert max(map(len, lines)) <= 80
    for command in COMMANDS:
        assert any(line.split() == [command.name, *command.help.split()] for line in lines)


def test_no_command_at_all_shows_the_same_and_fails(capsys: Capture) -> None:
    assert main([]) == 2
    shown = capsys.readouterr().out
    main(["-h"])
    assert capsys.readouterr().out == shown


@pytest.mark.parametrize(
    ("word", "suggestion"), [("trian", "train"), ("gen", "generate"), ("fly", "--help")]
)
def test_an_unknown_command_is_one_line_with_a_suggestion(
    word: str, suggestion: str, capsys: Capture
) -> None:
    assert main([word]) == 2
    said = capsys.readouterr().err
    assert repr(word) in said
    assert suggestion in said
    assert said.count("\n") == 1


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_every_command_has_help_and_version_under_its_name(
    command: Command, capsys: Capture
) -> None:
    for flag, words in (("--help", f"usage: shardmlx {command.name} "), ("--version", "shardmlx ")):
        with pytest.raises(SystemExit) as ended:
            main([command.name, flag])
        assert ended.value.code == 0
        assert capsys.readouterr().out.startswith(words)
    assert command.line.command == command.name


@pytest.mark.parametrize("name", ["generate", "chat", "serve", "evaluate", "hub", "export"])
def test_help_of_a_command_is_short_and_help_all_has_the_rest(name: str, capsys: Capture) -> None:
    line = BY_NAME[name].line
    listed = {}
    for flag in ("--help", "--help-all"):
        with pytest.raises(SystemExit):
            main([name, flag])
        text = capsys.readouterr().out
        flags = set(re.findall(r"^  (?:-\w [\w{},]+, )?--([a-z-]+)", text, re.MULTILINE))
        listed[flag] = flags - {"version", "help-all"}
    options = [each for each in written(line.options) if not each.rules.positional]
    every = {each.flag[2:] for each in options if each.rules.flag}
    assert listed["--help-all"] == every
    assert listed["--help"] <= every
    assert 9 <= len(listed["--help"]) <= 13
    needed = {each.flag[2:] for each in options if each.default is None}
    assert needed <= listed["--help"]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_help_ends_with_two_examples_that_the_command_takes(
    command: Command, capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("lora.yaml").write_text("data: my-data\n")
    with pytest.raises(SystemExit):
        main([command.name, "--help"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[-3:] == ["examples:", *(f"  {example}" for example in command.examples)]
    for program, first, *words in map(shlex.split, command.examples):
        name, own = first, tuple(words)
        if first == "launch":
            _, name, own = BY_NAME["launch"].line.load_before(words)
        assert (program, command.name in (first, name)) == ("shardmlx", True)
        assert BY_NAME[name].line.load_given(own)[1].names


def test_commands_of_ranks_are_those_that_can_be_launched() -> None:
    use = ("generate", "chat", "serve", "evaluate")
    assert ("train", *use, "doctor", "profile") == OF_RANKS


def test_an_entry_is_a_shim_and_imports_no_entry() -> None:
    for command in COMMANDS:
        text = (ROOT / f"shardmlx/{command.name}.py").read_text()
        assert f'run_module("{command.name}")' in text
        assert [line for line in text.splitlines() if "import" in line] == [
            "from shardmlx.main import run_module"
        ]


def test_doctor_with_ssh_is_asked_by_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "1")
    assert main(["doctor", "--ssh", "--hostfile", "/nowhere"]) == 0


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        ("train --data d --hostfile hosts", "launch --hostfile hosts train ..."),
        ("generate --hostfile hosts", "launch --hostfile hosts generate ..."),
        ("train --data d --pipeline-stages 2", "launch -n 2 train ..."),
        ("train --train --pipeline-stages 2 --data-parallel 2", "launch -n 4 train ..."),
        ("train --model m", "give --model and --data"),
        ("launch -n 2 train", "give --model and --data"),
        ("launch --ssh train", "shardmlx launch --hostfile FILE train"),
        ("launch --hostfile train --model m", "shardmlx launch --hostfile FILE train ..."),
        ("launch -n generate --model m", "shardmlx launch --ranks N generate ..."),
    ],
)
def test_a_job_that_is_not_meant_does_not_start(words: str, remedy: str, capsys: Capture) -> None:
    assert main(words.split()) == 2
    said = capsys.readouterr().err
    assert remedy in said
    assert said.count("\n") == 1


def test_only_the_module_of_the_command_is_imported() -> None:
    program = (
        "import sys; from shardmlx.main import main\n"
        "main(['schedule', '--pipeline-stages', '2', '--micro-batches', '2'])\n"
        "loaded = {name.split('.')[1] for name in sys.modules if name.startswith('shardmlx.')}\n"
        "print(sorted(loaded & {'train', 'plan', 'inspect', 'launch', 'planning', 'hosts'}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "[]"


def test_a_reader_that_has_gone_ends_a_command_as_sigpipe_would_without_a_line() -> None:
    read, write = os.pipe()
    os.close(read)
    for words in (["--help"], ["train", "--help"]):
        command = [sys.executable, "-m", "shardmlx", *words]
        done = subprocess.run(command, cwd=ROOT, stdout=write, stderr=subprocess.PIPE)
        assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, b"")
    os.close(write)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize(
    ("words", "unbuffered"),
    [("--help", ""), ("--version", "1"), ("train --help-all", ""), ("schedule", "1")],
)
def test_output_that_a_full_disk_does_not_take_is_one_line_and_a_failure(
    words: str, unbuffered: str
) -> None:
    stages = ["--pipeline-stages", "2", "--micro-batches", "2"] if words == "schedule" else []
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", "shardmlx", *words.split(), *stages],
            cwd=ROOT,
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode == 1
    assert "No space left on device" in done.stderr
    assert done.stderr.count("\n") == 1
