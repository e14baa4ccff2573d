"""What a host tells of itself."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import shardmlx
from shardmlx.hosts import probe_script
from shardmlx.hosts.reachability import Probe
from shardmlx.hosts.remote_login import RemoteLogin


@pytest.mark.parametrize(
    ("shell", "kind"),
    [("sh", "sh"), ("bash", "sh"), ("zsh", "sh"), ("tcsh", "csh"), ("fish", ""), ("false", "")],
)
def test_a_shell_is_told_by_what_it_runs(shell: str, kind: str) -> None:
    path = shutil.which(shell)
    if path is None:
        pytest.skip(f"{shell} is not installed")
    assert probe_script.shell_kind(path) == kind


def test_a_shell_is_told_by_what_it_runs_whatever_its_name_and_its_scripts(tmp_path: Path) -> None:
    shell = tmp_path / "fish"
    shell.write_text("#!/bin/sh\nprintf 'a title'; echo; exec /bin/sh \"$@\"\n")
    shell.chmod(0o755)
    assert probe_script.shell_kind(str(shell)) == "sh"
    assert probe_script.shell_kind(str(tmp_path / "none")) is None


def test_a_temporary_directory_that_cannot_be_written_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """mpirun takes the first of these variables, and no other directory if that one fails."""
    monkeypatch.delenv("PRTE_MCA_prte_tmpdir_base", raising=False)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("TMP", str(tmp_path / "none"))
    assert probe_script.temporary_fault() is None
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setenv("TMPDIR", str(tmp_path / "none"))
    assert probe_script.temporary_fault() == f"{tmp_path / 'none'} (No such file or directory)"


def test_a_place_is_a_link_to_the_environment_of_this_user_or_is_refused(tmp_path: Path) -> None:
    python = tmp_path / "env" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text("")
    place = tmp_path / "place"
    assert probe_script.place_fault("", str(python)) is None
    lacks = probe_script.place_fault(str(place), str(python))
    assert lacks == f"{place}/bin/python3 (No such file or directory)"
    (python.parent / "python3").write_text("another")
    fault = probe_script.place_fault(str(place), str(python))
    assert fault == f"python3 beside {python} is another Python"
    (python.parent / "python3").unlink()
    (python.parent / "python3").symlink_to("python")
    assert probe_script.place_fault(str(place), str(python)) is None
    assert place.readlink() == python.parents[1]
    assert probe_script.place_fault(str(place), str(python)) is None  # as at a restart
    place.unlink()
    place.symlink_to(tmp_path)
    taken = f"{place} is something else than a link of this user to {python.parents[1]}"
    assert probe_script.place_fault(str(place), str(python)) == taken
    place.unlink()
    place.mkdir()
    assert probe_script.place_fault(str(place), str(python)) == taken


def test_the_shardmlx_is_the_one_that_ranks_import(tmp_path: Path) -> None:
    """By the working directory, as with python -m."""
    assert probe_script.imported() == (shardmlx.__version__, str(Path(shardmlx.__file__).parent))
    package = tmp_path / "shardmlx"
    package.mkdir()
    (package / "__init__.py").write_text('__version__ = "0.0.7"\n')
    remote = RemoteLogin(("ssh",), sys.executable, "/bin/sh", str(tmp_path), (str(package),))
    probe = Probe(remote.command(None))
    answer = probe.receive()
    probe.close()
    assert answer is not None
    assert answer["versions"]["shardmlx"] == "0.0.7"
    assert answer["imported_from"] == str(package)
    assert (answer["daemon"], answer["files"]) == (True, [True])


def test_an_answer_is_found_wherever_it_stands_in_a_line(tmp_path: Path) -> None:
    said = probe_script.MARK + json.dumps({"port": 1})
    script = f"printf '%s\\n' 'a line'; printf '\\033]0;mini\\a'; printf '%s' '{said}'; echo bye"
    probe = Probe(["sh", "-c", script])
    assert probe.receive() == {"port": 1}
    assert probe.receive() is None
    assert probe.ended() == (0, "a line\n")
    probe.close()


def test_a_login_script_that_reads_a_line_takes_none_of_the_program() -> None:
    remote = RemoteLogin(("ssh",), sys.executable, "/bin/sh", os.getcwd())
    script = ["sh", "-c", 'read line; exec "$@"', "sh", *remote.command(None)]
    probe = Probe(script)
    answer = probe.receive()
    probe.close()
    assert answer is not None
    assert answer["daemon"] is True


def test_the_program_suits_an_old_python() -> None:
    """Python 3.8 is enough to be told that it is too old."""
    source = Path(probe_script.__file__).read_text(encoding="utf-8")
    check = "import ast,sys; ast.parse(sys.stdin.read(), feature_version=(3, 8))"
    subprocess.run([sys.executable, "-c", check], input=source, text=True, check=True)
