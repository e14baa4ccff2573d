"""The wheel holds what it should, and works beside a user's own modules of the same names."""

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from zipfile import ZipFile

import pytest

import shardmlx
from shardmlx.common.mlx_build import EXTRAS

ROOT = Path(__file__).parents[3]
PAGES = (
    *("shardmlx/common/page", "shardmlx/islands/page"),
    *("shardmlx/runreport/page", "shardmlx/server/pages"),
)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, so that nothing is left in the working tree."""
    directory = tmp_path_factory.mktemp("wheel")
    source = directory / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("shardmlx", "models", "partitioners"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=ignored)
    done = subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", directory, source],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = directory.glob("*.whl")
    return path


def modules(directory: str, prefix: str) -> set[str]:
    """What a wheel should hold of the Python files below a directory; links are not followed."""
    top = ROOT / directory
    return {prefix + path.relative_to(top).as_posix() for path in top.rglob("*.py")}


def test_the_wheel_holds_the_package_and_nothing_beside_it(wheel: Path) -> None:
    with ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert names == (
        modules("shardmlx", "shardmlx/")
        | modules("models", "shardmlx/models/")
        | modules("partitioners", "shardmlx/partitioners/")
        | {"shardmlx/py.typed"}
        | {f"{page}/{path.name}" for page in PAGES for path in (ROOT / page).iterdir()}
    )


def test_every_folder_is_declared_and_every_extra_is_in_all() -> None:
    """setuptools warns of folders of data that it takes for packages which nobody declared."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    folders = {
        ".".join(path.relative_to(ROOT).parts)
        for path in [ROOT / "shardmlx", *(ROOT / "shardmlx").rglob("*/")]
        if path.is_dir() and "__pycache__" not in path.parts
    }
    linked = {each for each in project["tool"]["setuptools"]["packages"] if "models." in each}
    assert set(project["tool"]["setuptools"]["packages"]) == folders | linked
    extras = project["project"]["optional-dependencies"]
    of_users = set(extras) - {
        "all",
        "dev",
        "demo",
        "bench",
        "tokenizer",
        "services",
        *EXTRAS.values(),
    }
    (every,) = extras["all"]
    assert set(every.removeprefix("shardmlx[").removesuffix("]").split(",")) == of_users


def test_the_wheel_has_the_version_and_licence_of_the_project(wheel: Path) -> None:
    assert wheel.name == f"shardmlx-{shardmlx.__version__}-py3-none-any.whl"
    with ZipFile(wheel) as archive:
        (licence,) = [name for name in archive.namelist() if name.endswith("/LICENSE")]
        assert archive.read(licence) == (ROOT / "LICENSE").read_bytes()


@pytest.fixture
def workplace(tmp_path: Path) -> Path:
    """A user's directory, with modules that are called as our directories are."""
    for name in ("models", "partitioners"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('a module of the user')\n")
    return tmp_path


def plan(directory: Path, path: Path | str) -> str:
    """What ``python -m shardmlx schedule`` prints in a directory."""
    options = ["--schedule", "1f1b", "--pipeline-stages", "2", "--micro-batches", "2"]
    done = subprocess.run(
        [sys.executable, "-m", "shardmlx", "schedule", *options, "--print", "actions"],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": str(path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


ACTIONS = "r0 0F0 0F1 0B0 0B1\nr1 1F0 1B0 1F1 1B1\n"


def test_the_wheel_runs_beside_a_users_own_modules(wheel: Path, workplace: Path) -> None:
    site = workplace / "site-packages"
    with ZipFile(wheel) as archive:
        archive.extractall(site)
    assert plan(workplace, site) == ACTIONS


def test_the_working_tree_runs_beside_a_users_own_modules(workplace: Path) -> None:
    assert plan(workplace, ROOT) == ACTIONS


@pytest.mark.parametrize("name", ["models", "partitioners"])
def test_directories_at_the_top_are_reached_through_links(name: str) -> None:
    link = ROOT / "shardmlx" / name
    assert link.is_symlink()
    assert link.readlink() == Path("..") / name
