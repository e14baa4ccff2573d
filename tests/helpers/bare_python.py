"""``shardmlx.inspect`` in a Python without MLX and MPI, as often as a test likes."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from subprocess import CompletedProcess

from testbed.jobs import ROOT

REFUSE = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"mlx", "mlx_lm", "mpi4py"}:
            raise ModuleNotFoundError(f"refused: {name}")

sys.meta_path.insert(0, Refuse())
"""

_FORKING = f"""{REFUSE}
import json, os, traceback
import huggingface_hub.file_download, huggingface_hub.hf_api
import shardmlx.planning.inspection
from shardmlx.main import main

# What it needs stays. It reads its own settings once: each call imports it anew.
for name in [name for name in sys.modules if name.split(".")[0] == "huggingface_hub"]:
    del sys.modules[name]
for line in sys.stdin:
    arguments, environment, *outputs = json.loads(line)
    pid = os.fork()
    if pid == 0:
        os.environ.clear()
        os.environ.update(environment)
        for number, output in enumerate(outputs, 1):
            os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT), number)
        try:
            status = main(["inspect", *arguments])
        except BaseException:
            traceback.print_exc()
            status = 1
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


class ForkingPython:
    """A Python that has imported the command, and runs it in forks of itself."""

    def __init__(self, process: subprocess.Popen[str], directory: Path) -> None:
        self._process = process
        self._outputs = directory / "out", directory / "err"

    def run(
        self, arguments: Sequence[str], environment: Mapping[str, str]
    ) -> CompletedProcess[str]:
        """Run the command with these arguments, and nothing but this environment."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        for output in self._outputs:
            output.unlink(missing_ok=True)
        request = [list(arguments), dict(environment), *map(str, self._outputs)]
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        status = int(self._process.stdout.readline())
        said, complaint = (output.read_text() for output in self._outputs)
        return CompletedProcess(arguments, status, said, complaint)


@contextmanager
def forking_python() -> Iterator[ForkingPython]:
    with (
        tempfile.TemporaryDirectory() as directory,
        subprocess.Popen(
            [sys.executable, "-W", "error", "-c", _FORKING],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as process,
    ):
        yield ForkingPython(process, Path(directory))
