"""Settings of a process that must be made before MLX and MPI are imported.

Two facts make this necessary. MLX has MPI support of its own, which would make all ranks one
data-parallel group, or start MPI a second time. And MLX's wheel for Linux brings the reference
BLAS, which an OpenBLAS that is already loaded overrides: 16 times as fast in float32.
"""

from __future__ import annotations

import contextlib
import ctypes
import ctypes.util
import os
import pwd
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from shardmlx.common.mlx_build import load_cuda, prepare_mlx
from shardmlx.compat import hide_mpi_from_mlx
from shardmlx.errors import UserError

_MALLOC_OPTIONS = {
    -1: 2**31 - 1,  # M_TRIM_THRESHOLD: free memory at the top of the heap before it is given back
    -2: 64 << 20,  # M_TOP_PAD: the heap grows by this at a time
    -3: 32 << 20,  # M_MMAP_THRESHOLD: from here on memory is mapped by itself; the highest allowed
    -8: 1,  # M_ARENA_MAX: one heap; those of threads are small, and given back
}
"""Settings by which glibc keeps freed memory, as numbered in its ``malloc.h``."""

LAUNCHED = "OMPI_SHARDMLX_LAUNCHED"
"""Variable that ``shardmlx.launch`` sets for its jobs, which need not say how to stop them. It
names a file for ``tell_launch``, of a name that no other job has. mpirun passes on to other hosts
what begins with OMPI_."""

EARLIER_END = "OMPI_SHARDMLX_EARLIER_END"
"""Variable in which ``shardmlx.launch`` tells a job that it starts again how the last one ended."""

BEGUN = "begun"
"""Word for launch that rank 0 has begun, which its process id follows."""

SAVED = "saved"
"""Word for a launch on another machine that a checkpoint is complete."""

TERMINAL = "SHARDMLX_TERMINAL"
"""Variable in which ``shardmlx launch`` names its terminal to rank 0 on the same machine, which
writes there itself: mpirun holds each line to its end, even a prompt or a growing answer."""

INSTALL_OPENBLAS = "sudo apt-get install libopenblas0-pthread"


@dataclass(frozen=True, slots=True)
class Blas:
    """The matrix library that MLX computes with on this machine."""

    name: str
    hint: str = ""

    def __str__(self) -> str:
        return f"BLAS: {self.name}{self.hint}"


def prepare() -> Blas:
    """Set up this process; call it before anything imports ``mlx.core`` or ``mpi4py``. Raises
    ``UserError`` where MLX has no library, or one that this machine cannot load."""
    installed = prepare_mlx()
    hide_mpi_from_mlx()
    find_home()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    if launched_rank() != 0:
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # rank 0 reports for all
    if sys.platform == "darwin":
        return Blas("Metal and Accelerate")
    # MLX has no cache on the CPU: to map memory again costs a few per cent of a step.
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:  # other C libraries have none
        for option, value in _MALLOC_OPTIONS.items():
            mallopt(option, value)
    blas = _put_openblas_first()
    load_cuda(installed)
    return blas


def find_home() -> None:
    """Set HOME where nothing has, since Open MPI does not start without it. ``UserError`` if this
    user has no home directory."""
    if os.environ.get("HOME"):
        return
    try:
        os.environ["HOME"] = pwd.getpwuid(os.getuid()).pw_dir
    except KeyError:
        raise UserError(
            "HOME is not set, and this user has none", "export HOME=DIRECTORY"
        ) from None


def _put_openblas_first() -> Blas:
    # One thread a rank: ranks share the cores, and competing threads cost more.
    given = os.environ.get("OPENBLAS_NUM_THREADS") or "1"
    if not given.isdecimal() or int(given) < 1:
        raise UserError(f"OPENBLAS_NUM_THREADS is {given!r}", "give a number of threads from 1")
    os.environ["OPENBLAS_NUM_THREADS"] = given
    library = ctypes.util.find_library("openblas")
    if library is None:
        hint = f"; about 16 times as fast with OpenBLAS: {INSTALL_OPENBLAS}"
        return Blas("MLX's reference BLAS, 1 thread a rank", hint)
    # Global, so that MLX finds its symbols there before those of its own BLAS.
    ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
    return Blas(f"OpenBLAS, {given} thread{'' if int(given) == 1 else 's'} a rank")


def keep_awake() -> None:
    """Let no Mac sleep while this process runs; its displays may, and should: macOS ends work of
    the GPU that disturbs one. One rank a host does it."""
    caffeinate = shutil.which("caffeinate")
    if caffeinate is not None and os.environ.get("OMPI_COMM_WORLD_LOCAL_RANK", "0") == "0":
        # It ends with this process. Not in its group: Ctrl-C leaves time to save.
        subprocess.Popen(
            [caffeinate, "-is", "-w", str(os.getpid())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )


def write_to_terminal() -> None:
    """Let rank 0 of a launched job write to the terminal that ``shardmlx launch`` names."""
    if TERMINAL in os.environ and launched_rank() == 0:
        with contextlib.suppress(OSError):  # then mpirun relays it
            terminal = os.open(os.environ[TERMINAL], os.O_WRONLY | os.O_NOCTTY)
            os.dup2(terminal, 1)
            os.close(terminal)


def tell_launch_of_begin() -> None:
    """Tell the ``shardmlx launch`` that started this job, if one has, that rank 0 has begun: this
    process."""
    tell_launch(f"{BEGUN}{os.getpid()}")


def tell_launch(word: int | str) -> None:
    """Tell the ``shardmlx launch`` that started this job, if one has, the job's status, or another
    word. Rank 0 calls it.

    The file is on launch's machine; elsewhere stdout carries a line, which launch takes out.
    """
    if LAUNCHED not in os.environ:
        return
    path = Path(os.environ[LAUNCHED])
    with contextlib.suppress(OSError):
        new = path.with_name(f"{path.name}.new")
        new.write_text(str(word), encoding="utf-8")
        new.replace(path)  # launch never sees half a word, or none
        return
    with contextlib.suppress(OSError):
        print(f"{path} {word}", flush=True)


def tell_launch_of_checkpoint() -> None:
    """Tell a ``shardmlx launch`` on another machine that a checkpoint is complete: it does not see
    the disk. Any thread of rank 0 may call it."""
    path = Path(os.environ.get(LAUNCHED, "."))
    if not path.parent.is_dir():
        with contextlib.suppress(OSError):
            sys.stdout.write(f"{path} {SAVED}\n")  # at once: other threads print, too
            sys.stdout.flush()


def note_stop(mark: Path, number: int) -> None:
    """Note beside the file of ``LAUNCHED`` which signal launch was sent. launch calls it, and then
    asks the ranks to stop by a signal that mpirun forwards."""
    with contextlib.suppress(OSError):
        _noted(mark).write_text(signal.Signals(number).name, encoding="utf-8")


def signal_name(number: int) -> str:
    """Return the name of a signal that asks this process to stop: of the one that launch was sent,
    where it was launch that asked."""
    if number == signal.SIGUSR1 and LAUNCHED in os.environ:
        mark = Path(os.environ[LAUNCHED])
        with contextlib.suppress(OSError):
            return _noted(mark).read_text(encoding="utf-8")
        if not mark.exists():  # launch is on another machine
            return "a signal to launch"
    return signal.Signals(number).name


def _noted(mark: Path) -> Path:
    return mark.with_name(f"{mark.name}.stop")


def cache_directory(name: str) -> Path:
    """Return this user's directory for caches. ``RuntimeError`` without a home."""
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(home).expanduser() / "shardmlx" / name


def launched_rank() -> int:
    """Return this process's rank before MPI starts, from mpirun; 0 without mpirun."""
    for name in ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK"):
        if name in os.environ:
            return int(os.environ[name])
    return 0


def launched_size() -> int:
    """Return the number of ranks before MPI starts, from Open MPI's mpirun; 1 without it."""
    return int(os.environ.get("OMPI_COMM_WORLD_SIZE", "1"))
