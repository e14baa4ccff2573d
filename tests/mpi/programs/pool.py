"""``pool.py DIRECTORY PID``: run Python programs one after the other on the same ranks.

Each is a file DIRECTORY/NUMBER.json with its arguments, as Python would take them, and its working
directory. What a rank says goes to NUMBER-RANK.out and .err, its exit status to NUMBER-RANK.status.
The ranks end when the file ``end`` is there, or when the process PID has ended.
"""

import gc
import json
import os
import runpy
import sys
import time
import traceback
from itertools import count
from pathlib import Path

SHORTEST, LONGEST = 0.02, 0.4
"""Seconds between two looks, and after a long time: some thirty ranks wait at a time, most of them
for minutes, and each look takes a little of the cores."""

directory, starter = Path(sys.argv[1]), int(sys.argv[2])
rank = os.environ.get("OMPI_COMM_WORLD_RANK", "0")


def next_program(number: int) -> tuple[list[str], str] | None:
    """Wait for a program; return its arguments and its directory, or None at the end."""
    file, end = directory / f"{number}.json", directory / "end"
    pause = SHORTEST
    while not file.exists():
        if end.exists() or not is_alive(starter):
            return None
        time.sleep(pause)
        pause = min(1.05 * pause, LONGEST)
    arguments, cwd = json.loads(file.read_text())
    return arguments, cwd


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def run(arguments: list[str]) -> int:
    """Run ``python ARGUMENTS`` in this process; return its exit status."""
    try:
        if arguments[0] == "-m":
            sys.argv = arguments[1:]
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = arguments
            runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except Exception:
        traceback.print_exc()
        return 1
    return 0


def flush_into(out: int, err: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(out, 1)
    os.dup2(err, 2)


own = os.dup(1), os.dup(2)
environment = dict(os.environ)
for number in count():
    program = next_program(number)
    if program is None:
        break
    path = directory / f"{number}-{rank}"
    files = [path.with_suffix(suffix).open("wb") for suffix in (".out", ".err")]
    flush_into(files[0].fileno(), files[1].fileno())
    os.chdir(program[1])
    status = run(program[0])
    flush_into(*own)
    for file in files:
        file.close()
    os.environ.clear()
    os.environ.update(environment)
    gc.collect()
    # What lives now are modules: the next collections need not go through them.
    gc.freeze()
    if "mlx.core" in sys.modules:
        sys.modules["mlx.core"].clear_cache()
        sys.modules["mlx.core"].reset_peak_memory()
    path.with_suffix(".new").write_text(str(status))
    path.with_suffix(".new").rename(path.with_suffix(".status"))
