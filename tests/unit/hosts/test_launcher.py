"""What launch does when jobs end and hosts go, with an mpirun and an ssh that only pretend."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from shardmlx.common.environment import SAVED
from shardmlx.config.commands import OF_RANKS
from shardmlx.distributed.processes import process_state
from shardmlx.errors import LOCAL_NETWORK, Stopped, UserError
from shardmlx.hosts import login_faults, supervisor
from shardmlx.hosts.launch_options import entries, read_options, replaced
from shardmlx.hosts.launcher import Launcher
from shardmlx.hosts.output_relay import SaidByRank0
from shardmlx.hosts.restarts import SECONDS_BETWEEN_LOOKS, GaveUp, Start
from shardmlx.hosts.supervisor import StartLimit, Supervisor
from shardmlx.planning.facts.hostfile import read_hostfile
from testbed.jobs import patience

ROOT = Path(__file__).parents[3]

# Each start writes down its words and its hosts, then ends as the next line of "ends" says.
MPIRUN = """\
#!/bin/sh
cd {directory}
echo "$*" >> starts
test "$1" = --hostfile && tr '\\n' ' ' < "$2" >> hosts_of_starts && echo >> hosts_of_starts
end=$(head -n 1 ends)
sed -i.old 1d ends
eval "$end"
"""

AGENT = """\
#!/bin/sh
if grep -qx "$1" {directory}/down; then
    echo "ssh: connect to host $1 port 22: No route to host" >&2
    exit 255
fi
shift
exec sh -c "$*"
"""

WELL = 'printf 0 > "$OMPI_SHARDMLX_LAUNCHED"'
"""All ranks come to their end."""


def gone(host: str) -> str:
    why = f"no login (ssh: connect to host {host} port 22: No route to host)"
    remedy = f"see that it is on and in the same network: cable, Wi-Fi, address ({LOCAL_NETWORK})"
    return f"{host.rpartition('@')[2]}: {why}: {remedy}"


HOSTS = """\
localhost slots=1  # memory=64GiB flops=20T
anna@mini.lan slots=1  # memory=16GiB flops=4T
book slots=2  # memory=32GiB flops=10T
"""


@dataclass
class Lab:
    """A directory with a fake mpirun and ssh, and a hostfile of three hosts and four slots. Time
    passes in ``pause`` alone, which calls ``on_pause``."""

    path: Path
    on_pause: Callable[[float], None] = lambda seconds: None
    time: float = 0.0

    def pause(self, seconds: float) -> None:
        """Wait."""
        self.time += seconds
        self.on_pause(seconds)

    def write(self, name: str, text: str) -> Path:
        file = self.path / name
        file.write_text(text.format(directory=self.path) if text.startswith("#!") else text)
        file.chmod(0o755)
        return file

    def launcher(self, *options: str, flags: tuple[str, ...] = ()) -> Launcher:
        checkpoints = ("--checkpoint-dir", str(self.path / "checkpoints"))
        return self.start(*flags, "train", "--data", "nowhere", *options, *checkpoints)

    def server(self) -> Launcher:
        return self.start("serve", "--model", "nowhere", "--port", "8080")

    def start(self, *words: str) -> Launcher:
        hosts = ("--hostfile", str(self.path / "hosts"), "--ssh-command", str(self.path / "agent"))
        return self.launch(*hosts, *words)

    def launch(self, *words: str) -> Launcher:
        options = read_options(words)
        mpirun = self.path / "mpirun"
        return Launcher(options, mpirun, Supervisor(), lambda: self.time, self.pause)

    def command(self, *words: str) -> list[str]:
        """The command line of launch with the mpirun of this directory."""
        program = (
            "import sys, pathlib; import shardmlx.hosts.launcher as launcher; "
            "launcher.mpirun_path = lambda: pathlib.Path(sys.argv[1]); "
            "from shardmlx.main import main; sys.exit(main(['launch', *sys.argv[2:]]))"
        )
        return [sys.executable, "-c", program, str(self.path / "mpirun"), *words]

    def ends(self, *commands: str) -> None:
        self.write("ends", "\n".join(commands) + "\n")

    @property
    def starts(self) -> list[list[str]]:
        """What each mpirun was given, after the hostfile and the agent."""
        file = self.path / "starts"
        lines = file.read_text().splitlines() if file.exists() else []
        return [line.split()[2:] for line in lines]

    @property
    def options(self) -> list[str]:
        """Of each start: ranks, and train's options that are not those of every start."""
        usual = str(self.path / "checkpoints")
        return [
            " ".join(["-n", words[1], *words[words.index("nowhere") + 1 :]])
            .replace(f" --checkpoint-dir {usual}", "")
            .replace(f" --hostfile {self.path / 'hosts'}", "")
            for words in self.starts
        ]

    @property
    def hosts(self) -> list[list[str]]:
        lines = (self.path / "hosts_of_starts").read_text().splitlines()
        return [
            [word for word in line.split() if word in ("localhost", "anna@mini.lan", "book")]
            for line in lines
        ]


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lab:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    for name in ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"):
        monkeypatch.setenv(name, "1")
    # Each host's answer is a Python of its own, which is slow to start on a busy machine.
    monkeypatch.setattr(login_faults, "SECONDS_TO_ANSWER", 120.0)
    lab = Lab(tmp_path)
    lab.write("mpirun", MPIRUN)
    lab.write("agent", AGENT)
    for name, text in (("prted", ""), ("down", ""), ("hosts", HOSTS)):
        lab.write(name, text)
    return lab


COMMIT = "mkdir -p checkpoints/step-{0:07d}; touch checkpoints/step-{0:07d}/COMMITTED; "


def test_a_job_that_ends_well_is_started_once(lab: Lab, capfd: pytest.CaptureFixture[str]) -> None:
    lab.ends(WELL)
    assert lab.launcher("--iters", "7").run() == 0
    words = [
        *("--hostfile", lab.path / "hosts", "-n", 4),
        *("--prtemca", "plm_ssh_agent", lab.path / "agent"),
        *(sys.executable, "-m", "shardmlx.train", "--data", "nowhere", "--iters", 7),
        *("--checkpoint-dir", lab.path / "checkpoints", "--hostfile", lab.path / "hosts"),
    ]
    command = " ".join(map(str, [lab.path / "mpirun", *words]))
    assert capfd.readouterr().out.splitlines() == [f"$ {command}"]
    assert (lab.path / "starts").read_text() == " ".join(map(str, words)) + "\n"


@pytest.mark.parametrize(
    ("end", "said"),
    [
        ("kill -9 $$", "the job failed with status 137: restart 1 of 3 in 1 s\n"),
        ("kill -9 $$", "launch: mpirun was killed, but the ranks had not come to their end\n"),
        # mpirun 5.0 ends with 0 where its ssh on another host is killed.
        ("exit 0", "the ranks had not come to their end"),
    ],
)
def test_a_failed_job_goes_on_from_its_checkpoint(
    end: str, said: str, lab: Lab, capfd: pytest.CaptureFixture[str]
) -> None:
    lab.ends(COMMIT.format(100) + end, WELL)
    assert lab.launcher().run() == 0
    assert lab.options == ["-n 4", "-n 4 --resume auto"]
    assert said in capfd.readouterr().out


def test_what_mpirun_leaves_behind_here_is_ended(lab: Lab) -> None:
    """Its login on a host that is cut off, which has its name, would wait for that host."""
    name = f"prterun-{socket.gethostname().partition('.')[0]}-$$@0"
    login = f"sh -c 'echo $$ > login; while :; do sleep 0.1; done' {name} > /dev/null 2>&1 &"
    lab.ends(f"{login} until test -s login; do sleep 0.05; done; {WELL}")
    assert lab.launcher().run() == 0
    pid = int((lab.path / "login").read_text())
    end = time.monotonic() + patience(10)
    while process_state(pid) != "gone":
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.parametrize("words", [("train", "--data", "nowhere"), ("doctor",), ("generate",)])
def test_a_status_0_of_mpirun_counts_only_if_rank_0_has_told_it(
    words: tuple[str, ...], lab: Lab
) -> None:
    lab.ends(*4 * ["exit 0"])
    launcher = lab.launch("-n", "2", *words)
    if words[0] == "train":
        with pytest.raises(GaveUp):
            launcher.run()
    else:
        assert launcher.run() == 1


def test_each_run_of_a_sweep_may_have_left_the_newer_checkpoint(lab: Lab) -> None:
    ends = [COMMIT.format(1).replace("/step", f"/{run}/step") for run in ("low", "high")]
    lab.ends(*(f"{end}exit 1" for end in ends), WELL)
    assert lab.launcher().run() == 0
    assert lab.options == ["-n 4", *["-n 4 --resume auto"] * 2]


@pytest.mark.parametrize(
    "options", ["--resume=never --iters 5", "--resume x --iters 5 --resume never", "--iters 5"]
)
def test_an_option_is_given_anew_or_taken_out(options: str) -> None:
    assert replaced(options.split(), resume="auto") == ("--iters", "5", "--resume", "auto")
    assert replaced(options.split(), resume=None) == ("--iters", "5")


def test_a_server_that_fails_starts_again_on_all_its_hosts(
    lab: Lab, capfd: pytest.CaptureFixture[str]
) -> None:
    """It waits for one that has gone."""
    is_down = lab.path / "down"

    def pause(seconds: float) -> None:
        if seconds == SECONDS_BETWEEN_LOOKS:
            is_down.write_text("")

    lab.on_pause = pause
    lab.ends("echo book > down; exit 137", WELL)
    assert lab.server().run() == 0
    assert lab.hosts == 2 * [["localhost", "anna@mini.lan", "book"]]
    assert lab.starts[0] == lab.starts[1]
    said = [line for line in capfd.readouterr().out.splitlines() if line.startswith("launch: ")]
    assert said == [
        "launch: the job failed with status 137: restart 1 of 3 in 1 s",
        f"launch: waits for {gone('book')}",
        "launch: the server starts again; its prefix cache is lost",
    ]


def test_a_server_of_loops_says_what_it_loses_and_what_it_keeps(
    lab: Lab, capfd: pytest.CaptureFixture[str]
) -> None:
    lab.ends("exit 137", WELL)
    assert lab.start("serve", "--model", "nowhere", "--port", "8080", "--train").run() == 0
    assert (
        capfd.readouterr().out.count(
            "the server starts again; models and snapshots that were not saved are lost, and saved "
            "states are there"
        )
        == 1
    )


def test_a_host_that_is_gone_is_dropped_and_taken_back(
    lab: Lab, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = lab.path / "temporary"
    directory.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(directory))
    lab.ends(
        COMMIT.format(1) + "echo anna@mini.lan > down; exit 1",
        COMMIT.format(2) + "echo book > down; exit 1",
        COMMIT.format(3) + ": > down; exit 1",
        WELL,
    )
    assert lab.launcher("--pipeline-stages", "4").run() == 0
    assert lab.hosts == [
        ["localhost", "anna@mini.lan", "book"],
        ["localhost", "book"],
        ["localhost", "anna@mini.lan"],
        ["localhost", "anna@mini.lan", "book"],
    ]
    assert lab.options == [
        "-n 4 --pipeline-stages 4",
        "-n 3 --resume auto",
        "-n 2 --resume auto",
        "-n 4 --pipeline-stages 4 --resume auto",
    ]
    said = [line for line in capfd.readouterr().out.splitlines() if line.startswith("launch: ")]
    assert [line for line in said if "restart" not in line] == [
        f"launch: goes on without {gone('anna@mini.lan')}",
        "launch: layout for 3 ranks: the run chooses it",
        f"launch: goes on without {gone('book')}",
        "launch: mini.lan is back",
        "launch: layout for 2 ranks: the run chooses it",
        "launch: book is back",
        "launch: all hosts are there: layout as given",
    ]
    assert list(directory.iterdir()) == []  # no hostfile stays behind


def test_a_spare_host_takes_the_place_of_one_that_is_lost_before_the_job_shrinks(
    lab: Lab, capfd: pytest.CaptureFixture[str]
) -> None:
    """Of book's two slots the first, and then the second too. Who is back has his place again."""
    lab.ends(
        COMMIT.format(1) + "echo anna@mini.lan > down; exit 1",
        COMMIT.format(2) + ": > down; exit 1",
        COMMIT.format(3) + "echo book > down; exit 1",
        COMMIT.format(4) + "echo anna@mini.lan >> down; exit 1",
        WELL,
    )
    flags = ("-n", "2", "--max-restarts", "4")
    assert lab.launcher("--pipeline-stages", "2", flags=flags).run() == 0
    assert lab.hosts == [
        ["localhost", "anna@mini.lan"],
        ["localhost", "book"],
        ["localhost", "anna@mini.lan"],
        ["localhost", "anna@mini.lan"],
        ["localhost"],
    ]
    assert lab.options == [
        "-n 2 --pipeline-stages 2",
        *["-n 2 --pipeline-stages 2 --resume auto"] * 3,
        "-n 1 --resume auto",
    ]
    said = [line for line in capfd.readouterr().out.splitlines() if line.startswith("launch: ")]
    assert [line for line in said if "restart" not in line] == [
        "launch: book would take the place of a host that is lost",
        f"launch: goes on without {gone('anna@mini.lan')}",
        "launch: book takes over",
        "launch: mini.lan is back",
        f"launch: goes on without {gone('book')}",
        f"launch: goes on without {gone('anna@mini.lan')}",
        "launch: layout for 1 rank: the run chooses it",
    ]


@pytest.mark.parametrize(("host", "options"), [("mini.lan", ""), (None, " --stage-map {map}")])
def test_a_stage_map_of_a_lost_host_is_left_out_and_another_one_kept(
    host: str | None, options: str, lab: Lab
) -> None:
    stages = [{"num_layers": 1}, {"num_layers": 1, **({} if host is None else {"host": host})}]
    file = lab.write("map.yaml", json.dumps({"stages": stages}))
    lab.ends(COMMIT.format(1) + "echo anna@mini.lan > down; exit 1", WELL)
    assert lab.launcher("--stage-map", str(file), flags=("-n", "2")).run() == 0
    assert lab.hosts[1] == ["localhost", "book"]
    assert lab.options[1] == f"-n 2{options.format(map=file)} --resume auto"


def test_a_server_takes_a_spare_host_and_waits_for_none(
    lab: Lab, capfd: pytest.CaptureFixture[str]
) -> None:
    lab.ends("echo anna@mini.lan > down; exit 137", WELL)
    assert lab.start("-n", "2", "serve", "--model", "nowhere", "--port", "8080").run() == 0
    assert lab.hosts == [["localhost", "anna@mini.lan"], ["localhost", "book"]]
    assert "launch: book takes over\n" in capfd.readouterr().out


def test_without_the_host_of_rank_0_there_is_nothing_to_go_on_from(lab: Lab) -> None:
    lab.write("hosts", "mini.lan slots=1\nlocalhost slots=1\n")
    lab.ends("echo mini.lan > down; exit 1")
    with pytest.raises(GaveUp, match=r"^the host of rank 0, mini\.lan: no login"):
        lab.launcher().run()


def test_a_host_that_never_answered_is_bad_input(
    lab: Lab, capfd: pytest.CaptureFixture[str]
) -> None:
    lab.write("down", "book\nanna@mini.lan\n")
    assert lab.launcher().run() == 2
    assert lab.starts == []
    lines = capfd.readouterr().err.splitlines()
    assert lines == [f"shardmlx: error: {gone(host)}" for host in ("anna@mini.lan", "book")]


def test_a_run_that_must_not_resume_does_so_only_from_its_own_checkpoint(lab: Lab) -> None:
    lab.ends("echo book > down; exit 1", COMMIT.format(1) + "exit 1", WELL)
    assert lab.launcher("--resume", "never").run() == 0
    assert lab.options == ["-n 4 --resume never", "-n 2 --resume never", "-n 2 --resume auto"]


@pytest.mark.parametrize("choice", ["never", "of-another-run/step-0000100"])
def test_where_rank_0_is_elsewhere_it_tells_of_the_checkpoint_to_go_on_from(
    lab: Lab, choice: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Launch sees no checkpoint there; and nothing of what it is told is shown."""
    lab.write("hosts", "anna@mini.lan slots=1\nlocalhost slots=1\n")
    saved = f'echo "$OMPI_SHARDMLX_LAUNCHED {SAVED}"; '
    ended = 'echo "$OMPI_SHARDMLX_LAUNCHED {}"; '
    lab.ends("exit 1", f"{saved}{ended.format(1)}exit 1", "exit 1", ended.format(0))
    assert lab.launcher("--resume", choice).run() == 0
    assert lab.options == [*[f"-n 2 --resume {choice}"] * 2, *["-n 2 --resume auto"] * 2]
    assert SAVED not in capfd.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "problem", "remedy"),
    [
        (["train", "--test"], "no hosts", "--hostfile"),
        (["-n", "2", "train", "--model", "M"], "train has no data", "--model and --data"),
        (["-n", "0", "train"], "--ranks is 0", ""),
        (["-n", "2", "--max-restarts", "1", "profile", "M"], "--max-restarts 1", ""),
        (["-n", "2", "train", "--itres", "3"], "'--itres'", "--iters"),
        (["train", "--max-restarts=0"], "--max-restarts stands", "--max-restarts N train"),
        (["train", "-n", "2"], "-n stands after train", "launch -n N train"),
        (["-n", "2", "doctor", "--ssh", "--hostfile", "F"], "doctor --ssh", "without launch"),
        (["-n", "2", "generate", "--temp", "-1"], "--temp is -1.0", ""),
        (["--hostfile", "/nowhere", "train", "--test"], "hostfile /nowhere", ""),
    ],
)
def test_bad_input_is_named(arguments: list[str], problem: str, remedy: str) -> None:
    with pytest.raises(UserError) as error:
        read_options(arguments)
    assert problem in error.value.problem
    assert remedy in error.value.remedy


def test_more_ranks_than_slots_are_refused(lab: Lab) -> None:
    with pytest.raises(UserError, match=r"^-n 5: .*hosts has 4 slots"):
        lab.launcher(flags=("-n", "5"))


def test_a_hostfile_that_can_be_read_once_is_read_once(lab: Lab) -> None:
    """As that of <(...): mpirun, rank 0 and launch have a copy."""
    read, write = os.pipe()
    os.write(write, HOSTS.encode())
    os.close(write)
    launch = read_options(["--hostfile", f"/dev/fd/{read}", "train", "--data", "nowhere"])
    os.close(read)
    assert launch.hosts == ("localhost", "mini.lan", "book")
    (copy,) = launch.files
    assert Path(copy).read_text() == HOSTS
    assert launch.flags.hostfile == copy
    given = str(lab.path / "hosts")
    assert read_options(["--hostfile", given, "train", "--data", "nowhere"]).files == (given,)


def test_mpirun_has_hosts_with_user_and_port_and_its_own_by_a_name_that_it_knows(lab: Lab) -> None:
    own = socket.gethostname().split(".")[0].swapcase()
    lines = f"{own} slots=1\nmini port=2222 username=anna slots=2\nbook slots=1\n"
    machines = read_hostfile(lab.write("hosts", lines))
    mini = "anna@mini slots=2 port=2222\n"
    everyone = [each.host for each in machines]
    assert entries(machines, everyone) == f"localhost slots=1\n{mini}book slots=1\n"
    assert entries(machines, everyone[:2]) == f"localhost slots=1\n{mini}"
    plain = read_hostfile(lab.write("hosts", lines.replace(own, "localhost")))
    assert entries(plain, ["localhost", "mini", "book"]) is None


def test_hosts_with_other_pythons_have_one_path_for_all(lab: Lab) -> None:
    """The path depends on these Pythons; without them ranks have the Python of launch."""
    assert lab.start("doctor").launch.place == ""
    lines = HOSTS.replace("book slots=2  #", "book slots=2  # python=/opt/b/bin/python")
    lab.write("hosts", lines)
    launcher = lab.start("doctor")
    launch = launcher.launch
    assert launch.pythons == {"book": "/opt/b/bin/python"}
    assert re.fullmatch("/tmp/shardmlx-[0-9a-f]{12}", launch.place)
    assert lab.start("generate").launch.place == launch.place
    words = launcher._words(Start(launch.hosts, 4, ()), None)
    assert f"--prefix {launch.place} " in " ".join(words)
    assert words[-3:] == [f"{launch.place}/bin/python3", "-m", "shardmlx.doctor"]
    lab.write("hosts", lines.replace("/opt/b", "/opt/c"))
    assert lab.start("doctor").launch.place not in ("", launch.place)


def test_without_a_directory_for_checkpoints_there_is_one(tmp_path: Path) -> None:
    launch = read_options(["-n", "2", "train", "--train", "--adapter-path", "out"])
    assert launch.options[1:] == ("--adapter-path", "out", "--checkpoint-dir", "out/checkpoints")
    fragile = read_options(["-n", "2", "--max-restarts", "0", "train", "--train"])
    assert fragile.options == ("--train",)
    assert read_options(["-n", "2", "train", "--test"]).options == ("--test",)
    file = tmp_path / "run.yaml"
    file.write_text("data: mine\ncheckpoint_dir: kept\n")
    assert read_options(["-n", "2", "train", "-c", str(file)]).options == ("-c", str(file))


@pytest.mark.parametrize(
    ("words", "in_order", "reads_stdin"),
    [
        (["train", "--data", "data"], True, False),
        (["profile", "MODEL", "--rows", "2"], False, False),
        (["generate", "--prompt", "Hello"], False, False),
        (["generate", "-p", "-"], False, True),
        (["generate", "--prompts", "-"], False, True),
        (["chat", "--max-tokens", "5"], False, True),
        (["serve", "--port", "0"], True, False),
        (["doctor", "--strict"], False, False),
    ],
)
def test_every_command_of_ranks_can_be_launched(
    words: list[str], in_order: bool, reads_stdin: bool
) -> None:
    """Training saves and a server finishes its answers when it is asked to stop. A conversation,
    and a prompt on stdin, have what is typed."""
    launch = read_options(["-n", "2", *words])
    assert launch.command in OF_RANKS
    assert launch.options[: len(words) - 1] == tuple(words[1:])
    assert (launch.control.in_order, launch.control.reads_stdin) == (in_order, reads_stdin)
    assert launch.max_restarts == (3 if words[0] in ("train", "serve") else 0)
    graceful = read_options(["-n", "2", "serve", "--grace", "600"])
    assert graceful.control.seconds > 600


@pytest.mark.parametrize("command", [each for each in OF_RANKS if each != "profile"])
def test_the_command_is_told_what_the_machines_have(command: str, lab: Lab) -> None:
    """By the hostfile of mpirun, unless it is given another one."""
    hosts = str(lab.path / "hosts")
    words = ("--train",) if command == "train" else ("--timeout=9",)
    told = read_options(["--hostfile", hosts, command, *words]).options
    assert told[:3] == (*words, "--hostfile", hosts)
    other = (*words, "--hostfile", "measured")
    assert read_options(["--hostfile", hosts, command, *other]).options[:3] == other


WAITS = """\
trap 'echo saved >> signals; exit 138' USR1
trap 'echo ended >> signals; exit 143' TERM
touch up
while true; do sleep 0.05; done
"""
STUBBORN = WAITS.replace("saved >> signals; exit 138", "deaf >> signals")


@pytest.mark.parametrize(
    ("job", "signals", "status", "heard"),
    [
        (WAITS, [signal.SIGTERM], 143, "saved\n"),
        (WAITS, [signal.SIGQUIT], 131, "saved\n"),
        (STUBBORN, [signal.SIGINT, signal.SIGINT], 130, "deaf\nended\n"),
    ],
)
def test_what_stops_launch_stops_the_ranks_in_order(
    lab: Lab, job: str, signals: list[signal.Signals], status: int, heard: str
) -> None:
    lab.ends(f". {lab.write('job', job)}")
    process = subprocess.Popen(
        lab.command("-n", "2", "train", "--train"),
        cwd=lab.path,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        text=True,
    )
    with process:
        _wait_for(lab.path / "up")
        for count, number in enumerate(signals, start=1):
            process.send_signal(number)
            _wait_for(lab.path / "signals", lines=count)
        error = process.communicate(timeout=30)[1]
    assert process.returncode == status
    assert (lab.path / "signals").read_text() == heard
    assert error.startswith("launch: asked all ranks to save and stop; a second signal ends them")


def test_one_end_of_a_terminal_is_one_signal_whatever_the_shell_sends(lab: Lab) -> None:
    """The kernel and the shell send SIGHUP, and bash sends a stopped job SIGTERM as well."""
    slow = WAITS.replace("'echo saved", "'sleep 0.5; echo saved")
    with started(lab, slow) as process:
        for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGHUP):
            process.send_signal(number)
        assert process.wait(30) == 129
    assert (lab.path / "signals").read_text() == "saved\n"


HEARS = "trap 'echo stops >> signals' TSTP\ntrap 'echo goes on >> signals' CONT\n"


def test_ctrl_z_stops_the_ranks_as_well_until_launch_goes_on(lab: Lab) -> None:
    with started(lab, HEARS + WAITS) as process:
        process.send_signal(signal.SIGTSTP)
        _wait_for(lab.path / "signals", lines=1)
        assert os.waitpid(process.pid, os.WUNTRACED)[1] >> 8 == signal.SIGSTOP
        process.send_signal(signal.SIGCONT)
        _wait_for(lab.path / "signals", lines=2)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 143
    assert (lab.path / "signals").read_text() == "stops\ngoes on\nsaved\n"


AT_ONCE = """\
import signal, subprocess, sys, time
from pathlib import Path
from shardmlx.hosts.output_relay import SaidByRank0
from shardmlx.hosts.supervisor import Supervisor

class Popen(subprocess.Popen):
    def __init__(self, *command, **options):
        super().__init__(*command, **options)
        while not Path("up").exists():
            time.sleep(0.01)
        signal.raise_signal(signal.SIGTSTP)

subprocess.Popen = Popen
supervisor = Supervisor()
with supervisor.listening():
    sys.exit(supervisor.run(["sh", "job"], SaidByRank0(Path("status"))).status)
"""


def test_ctrl_z_as_mpirun_starts_stops_the_ranks_as_well(tmp_path: Path) -> None:
    (tmp_path / "job").write_text(HEARS + WAITS)
    with subprocess.Popen(
        [sys.executable, "-c", AT_ONCE],
        cwd=tmp_path,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    ) as process:
        try:
            assert os.waitpid(process.pid, os.WUNTRACED)[1] >> 8 == signal.SIGSTOP
            _wait_for(tmp_path / "signals", lines=1)
            process.send_signal(signal.SIGCONT)
            _wait_for(tmp_path / "signals", lines=2)
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 138
        finally:
            process.kill()
    assert (tmp_path / "signals").read_text() == "stops\ngoes on\nsaved\n"


WRITES = "touch up\ni=0; while [ $i -lt {} ]; do echo step $i; i=$((i + 1)); sleep 0.02; done\n"
COMES_TO_ITS_END = (
    WRITES.format(5)
    + "until [ -e closed ]; do sleep 0.02; done\n"
    + WRITES.format(5)
    + WELL
    + "; echo done > signals"
)


@pytest.mark.parametrize(
    ("nohup", "command", "job", "status", "heard"),
    [
        ("", "train", WAITS.replace("touch up\n", WRITES.format(5000)), 129, "saved\n"),
        ("trap '' HUP;", "train", COMES_TO_ITS_END, 0, "done\n"),
        ("", "train", "trap '' USR1\n" + COMES_TO_ITS_END, 0, "done\n"),
        # What it shows is all that it leaves.
        ("", "doctor", "trap '' HUP\n" + COMES_TO_ITS_END, 129, "done\n"),
    ],
)
def test_a_reader_that_goes_away_stops_the_ranks_in_order_but_not_with_nohup(
    nohup: str, command: str, job: str, status: int, heard: str, lab: Lab
) -> None:
    """mpirun itself would kill its ranks at the broken pipe."""
    words = ("-n", "2", command, *(("--train",) if command == "train" else ()))
    with started(lab, job, nohup, words, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line == "step 3\n":
                break
        process.stdout.close()
        (lab.path / "closed").touch()
        assert process.wait(patience(30)) == status
    assert (lab.path / "signals").read_text() == heard


def test_a_closed_terminal_stops_the_ranks_in_order(lab: Lab) -> None:
    lab.ends(f". {lab.write('job', WAITS)}")
    child, terminal = pty.fork()
    if child == 0:
        os.environ["PYTHONPATH"] = str(ROOT)
        os.chdir(lab.path)
        os.execv(sys.executable, lab.command("-n", "1", "train", "--train"))
    _wait_for(lab.path / "up")
    os.close(terminal)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 129
    assert (lab.path / "signals").read_text() == "saved\n"


DEAF = "trap '' USR1 INT\ntouch up\nwhile true; do sleep 0.05; done\n"
"""An mpirun that waits for its daemons obeys neither."""


def test_before_a_rank_has_begun_on_other_hosts_one_ctrl_c_ends_mpirun(lab: Lab) -> None:
    hosts = ("--hostfile", str(lab.path / "hosts"), "--ssh-command", str(lab.path / "agent"))
    with started(lab, DEAF, words=(*hosts, "train", "--train")) as process:
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130


def test_an_mpirun_that_starts_no_rank_is_explained_and_ended_at_the_timeout(
    lab: Lab, capfd: pytest.CaptureFixture[str]
) -> None:
    lab.ends(f". {lab.write('job', DEAF)}")
    with pytest.raises(GaveUp, match=r"no rank within 2 s \(see --timeout\)"):
        lab.launcher("--timeout", "2").run()
    assert "launch: mpirun has started no rank for 1 s; it is ended after 2 s (--timeout)\n" in (
        capfd.readouterr().err
    )


@contextmanager
def started(
    lab: Lab,
    job: str,
    shell: str = "",
    words: tuple[str, ...] = ("-n", "2", "train", "--train"),
    stdout: int = subprocess.DEVNULL,
) -> Iterator[subprocess.Popen[str]]:
    """A launch whose mpirun runs the script ``job``, and has come to its ``touch up``."""
    lab.ends(f". {lab.write('job', job)}")
    with subprocess.Popen(
        ["sh", "-c", f'{shell} exec "$@"', "sh", *lab.command(*words)],
        cwd=lab.path,
        stderr=subprocess.DEVNULL,
        stdout=stdout,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        text=True,
    ) as process:
        try:
            _wait_for(lab.path / "up")
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("job", "status"), [("exec sleep 60", 143), ("sleep 8 & sleep 2.5; exit 3", 3)]
)
def test_an_mpirun_whose_ranks_are_gone_is_ended(
    job: str, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "SECONDS_ALONE", 2.0)
    said = SaidByRank0(tmp_path / "status")
    assert Supervisor().run(["sh", "-c", job], said).status == status


RANK_0 = """sh -c '
    printf begun$$ > "$OMPI_SHARDMLX_LAUNCHED"
    sleep 2.5
    : > "$OMPI_SHARDMLX_LAUNCHED.over"
' & wait"""


@pytest.mark.parametrize(
    ("job", "rank_0_here"),
    [
        (f"{RANK_0}; sleep 60 & exec sleep 60", True),
        (f'{RANK_0}; printf 0 > "$OMPI_SHARDMLX_LAUNCHED"; sleep 60 & exec sleep 60', True),
        (
            'printf 0 > "$OMPI_SHARDMLX_LAUNCHED"; : > "$OMPI_SHARDMLX_LAUNCHED.over"; '
            "sleep 60 & exec sleep 60",
            False,
        ),
    ],
    ids=["rank 0 is gone", "rank 0 has told the status", "it has, on another host"],
)
def test_an_mpirun_of_several_hosts_whose_rank_0_is_gone_is_ended(
    job: str, rank_0_here: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its logins on the others are its children, and live. While rank 0 lives, mpirun does."""
    monkeypatch.setattr(supervisor, "SECONDS_ALONE", 1.0)
    said = SaidByRank0(tmp_path / "status")
    limit = StartLimit(60.0, lambda seconds: [])
    ended = Supervisor().run(["sh", "-c", job], said, rank_0_here=rank_0_here, limit=limit)
    assert ended.status == 128 + signal.SIGTERM
    assert not ended.too_late
    assert (tmp_path / "status.over").exists()


def test_a_job_whose_first_rank_begins_while_hosts_are_asked_goes_on(tmp_path: Path) -> None:
    """The question takes what is left of the limit."""
    status, asked = tmp_path / "status", tmp_path / "asked"

    def explain(seconds: float) -> list[str]:
        asked.touch()
        _wait_for(status)
        time.sleep(1.5)
        return []

    begins = f"until [ -e {asked} ]; do sleep 0.02; done; printf begun$$ > {status}"
    limit = StartLimit(2.0, explain)
    job = ["sh", "-c", f"{begins}; sleep 4; exit 3"]
    ended = Supervisor().run(job, SaidByRank0(status), limit=limit)
    assert (ended.status, ended.too_late) == (3, False)


def test_the_status_that_rank_0_leaves_is_the_job_s(lab: Lab) -> None:
    lab.ends('printf 2 > "$OMPI_SHARDMLX_LAUNCHED"; exit 143')
    assert lab.launcher().run() == 2


def test_a_signal_between_two_starts_ends_launch() -> None:
    with Supervisor().listening(), pytest.raises(Stopped) as stop:
        signal.raise_signal(signal.SIGTERM)
    assert stop.value.signal == signal.SIGTERM


def _wait_for(path: Path, lines: int = 0) -> None:
    end = time.monotonic() + patience(30)
    while not path.exists() or path.read_text().count("\n") < lines:
        assert time.monotonic() < end, f"{path} never came"
        time.sleep(0.02)


def test_a_conversation_has_the_terminal_and_ctrl_c_reaches_mpirun_by_it(lab: Lab) -> None:
    """mpirun reads a terminal only in the terminal's own session, so that what is typed there
    reaches mpirun itself: text, and Ctrl-C."""
    lab.write("mpirun", "#!/bin/sh\ntrap 'exit 130' INT\nread line; echo \"got $line\"\n"
              "while :; do sleep 0.05; done\n")  # fmt: skip
    child, terminal = pty.fork()
    if child == 0:
        os.environ["PYTHONPATH"] = str(ROOT)
        os.execv(sys.executable, lab.command("-n", "1", "chat"))
    said = read_until(terminal, b"shardmlx.chat")
    os.write(terminal, b"hello\n")
    said = read_until(terminal, b"got hello")
    os.write(terminal, b"\x03")
    _, status = os.waitpid(child, 0)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(status) == 130, said


def read_until(terminal: int, words: bytes) -> bytes:
    shown = b""
    end = time.monotonic() + patience(30)
    while words not in shown:
        assert time.monotonic() < end, shown
        shown += os.read(terminal, 1 << 12)
    return shown
