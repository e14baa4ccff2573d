"""The library of MLX on Linux comes in a package of its own: none is said before MLX is imported,
and two are named. Packages are real ones, as pip leaves them, in a directory on the path."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from shardmlx.common.mlx_build import CUDA_BUFFER, EXTRAS
from tests.helpers.sources import ROOT

IS_MAC = sys.platform == "darwin"

PROGRAM = """
import importlib.metadata as metadata
import os
import sys

{hidden}
from shardmlx.common import mlx_build
from shardmlx.errors import UserError

print(*mlx_build.libraries())
try:
    mlx_build.prepare_mlx()
except UserError as error:
    print(error)
print(os.environ.get("{variable}", "unset"))
print("mlx.core" in sys.modules)
"""


def said_with(directory: Path, *packages: str) -> list[str]:
    """Return what a process says of MLX where just these packages have its library."""
    for package in packages:
        place = directory / f"{package.replace('-', '_')}-0.32.4.dist-info"
        place.mkdir()
        (place / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {package}\nVersion: 0.32.4\n"
        )
    environment = {**os.environ, "PYTHONPATH": f"{directory}:{ROOT}"}
    environment.pop(CUDA_BUFFER[0], None)
    hidden = "" if "mlx-cpu" in packages else _without_the_cpu_s()
    program = PROGRAM.format(hidden=hidden, variable=CUDA_BUFFER[0])
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        cwd=directory,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.splitlines()


def _without_the_cpu_s() -> str:
    """Return what hides the package that this environment has."""
    return (
        "real = metadata.version\n"
        "def version(name):\n"
        "    if name == 'mlx-cpu':\n"
        "        raise metadata.PackageNotFoundError(name)\n"
        "    return real(name)\n"
        "metadata.version = version\n"
    )


@pytest.mark.skipif(IS_MAC, reason="a Mac's mlx brings its library")
@pytest.mark.parametrize(
    ("packages", "buffer"),
    [
        (["mlx-cpu"], "unset"),
        (["mlx-cuda-13"], CUDA_BUFFER[1]),
        (["mlx-cuda-12"], CUDA_BUFFER[1]),
        (["mlx-cpu", "mlx-cuda-13"], CUDA_BUFFER[1]),
    ],
    ids=str,
)
def test_libraries_are_found_and_cuda_frees_as_plans_count(
    packages: list[str], buffer: str, tmp_path: Path
) -> None:
    assert said_with(tmp_path, *packages) == [" ".join(packages), buffer, "False"]


@pytest.mark.skipif(IS_MAC, reason="a Mac's mlx brings its library")
def test_none_is_said_with_what_to_install(tmp_path: Path) -> None:
    found, problem, buffer, is_imported = said_with(tmp_path)
    assert (found, buffer, is_imported) == ("", "unset", "False")
    assert "mlx[cuda13]" in problem
    assert "mlx[cpu]" in problem


def test_each_library_has_an_extra_of_its_own() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for extra in EXTRAS.values():
        assert project["optional-dependencies"][extra] == [f"mlx[{extra}]>=0.32.4"]
    assert "mlx>=0.32.4" in project["dependencies"]
