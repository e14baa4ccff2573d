"""The build of MLX on this machine: the package that brings its library. Nothing is imported.

On a Mac mlx itself brings the one for Metal. On Linux it brings none: that of the CPU and those of
CUDA come in packages of their own, each of which has the same file, ``libmlx.so``. Where two are
installed, the file is that of the last one, and pip says nothing.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
from collections.abc import Collection, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from types import MappingProxyType

from shardmlx.errors import UserError, one_line

EXTRAS: Mapping[str, str] = MappingProxyType(
    {"mlx-cpu": "cpu", "mlx-cuda-12": "cuda12", "mlx-cuda-13": "cuda13"}
)
"""The packages with a library for Linux, each with our extra that installs it."""

CUDA_BUFFER = ("MLX_MAX_MB_PER_BUFFER", "50")
"""Variable of the megabytes after which MLX ends a command buffer, and its value on CUDA, where
MLX's own is up to twenty times that of a Mac. MLX frees the arrays of a buffer at its end, and
plans count on a Mac's: on an H200 peaks were then within 1% of the plan, else 13 to 35% above it.
The value cost no time there."""


def libraries() -> list[str]:
    """Return the packages with a library for Linux that are installed, of which one counts."""
    found = []
    for name in EXTRAS:
        try:
            metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        found.append(name)
    return found


def prepare_mlx() -> Sequence[str]:
    """Set what MLX reads at its start; return the packages with its library on Linux. Raises
    ``UserError`` where it has none."""
    if sys.platform == "darwin":
        return ()
    installed = libraries()
    if not installed and not _brings_library():
        raise UserError("MLX has no library on this machine", remedy_for(sys.executable))
    if any("cuda" in each for each in installed):
        os.environ.setdefault(*CUDA_BUFFER)
    return installed


def load_cuda(installed: Sequence[str]) -> None:
    """Load MLX's library, as MLX's import will, if it may be one of CUDA by the packages that are
    ``installed``. Raises ``UserError`` if it cannot be loaded, for instance without CUDA."""
    if not any("cuda" in each for each in installed):
        return
    for directory in _directories():
        try:
            ctypes.CDLL(str(directory / "lib" / "libmlx.so"))
        except OSError as error:
            named = " and ".join(installed)
            raise UserError(
                f"MLX's library, of {named}, cannot be loaded: {one_line(error)}",
                remedy_for(sys.executable, installed),
            ) from None


def _directories() -> list[Path]:
    """Return the directories of the package mlx."""
    spec = importlib.util.find_spec("mlx")
    return [] if spec is None else [*map(Path, spec.submodule_search_locations or ())]


def remedy_for(python: str, installed: Collection[str] = ()) -> str:
    """Return how a machine whose ranks run ``python`` gets one library, in place of those that are
    installed."""
    remove = f"{python} -m pip uninstall -y {' '.join(installed)}; " if installed else ""
    return (
        f"{remove}{python} -m pip install 'mlx[cuda13]' for an NVIDIA GPU ([cuda12] for a driver "
        "before 580), 'mlx[cpu]' without one"
    )


def _brings_library() -> bool:
    """Return whether mlx itself has a library, as one built from source does; also if nobody knows,
    since its import says what is missing."""
    try:
        files = metadata.files("mlx")
    except metadata.PackageNotFoundError:
        return True
    return files is None or any(file.name == "libmlx.so" for file in files)
