"""Imports point down only, as docs/developers/architecture.md says; nothing loads too much."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

from tests.helpers.fake_models import TINY, model_files, write
from tests.helpers.sources import nodes, parsed

ROOT = Path(__file__).parents[3]
PACKAGE = ROOT / "shardmlx"
MLX_OR_MPI = {"mlx", "mlx_lm", "mpi4py"}
ROW = re.compile(r"^\| `?(\w+)`? \| (.+) \| ([\w, ]*)\|$", re.MULTILINE)

TABLE = [
    row
    for row in ROW.findall((ROOT / "docs/developers/architecture.md").read_text())
    if row[0] != "package"
]
PACKAGES = [name for name, _, _ in reversed(TABLE)]
"""From the bottom; ``commands`` are all modules at the top that have no row of their own."""
NEEDS = {name: needs.strip() for name, _, needs in TABLE}


def find_sources() -> dict[str, Path]:
    """Return the file of every module, by its name without ``shardmlx.``; "" is the package."""
    files = {}
    for pattern in ("**/*.py", "models/**/*.py", "partitioners/*.py"):  # ** follows no links
        for path in PACKAGE.glob(pattern):
            parts = path.relative_to(PACKAGE).with_suffix("").parts
            files[".".join(part for part in parts if part != "__init__")] = path
    return files


SOURCES = find_sources()
MODULES = sorted(SOURCES.keys() - {""})


def package_of(module: str) -> str:
    top = module.split(".")[0]
    return top if top in NEEDS else "commands"


@cache
def imports(path: Path) -> frozenset[str]:
    """Return all modules that a file imports, anywhere in it, by their full names."""
    names: set[str] = set()
    for node in nodes(path):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert node.module is not None
            # 'from shardmlx import options' names a module, 'from shardmlx.errors import X' none.
            submodules = {f"{node.module}.{alias.name}" for alias in node.names}
            ours = {each for each in submodules if each.removeprefix("shardmlx.") in SOURCES}
            names |= ours or {node.module}
    return frozenset(names)


def own_imports(module: str) -> set[str]:
    names = {name for name in imports(SOURCES[module]) if name.split(".")[0] == "shardmlx"}
    return {name.removeprefix("shardmlx").removeprefix(".") for name in names} - {""}


def foreign_imports(module: str) -> set[str]:
    return {name.split(".")[0] for name in imports(SOURCES[module])} - {"shardmlx"}


def test_the_table_names_every_package() -> None:
    packages = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert packages <= set(PACKAGES)
    assert len(PACKAGES) == len(set(PACKAGES))


def test_a_package_says_what_the_table_says() -> None:
    said = {
        name: (ast.get_docstring(parsed(SOURCES[name])) or "").split("\n\n")[0].replace("\n", " ")
        for name in PACKAGES
        if name != "commands"
    }
    assert said == {name: purpose for name, purpose, _ in TABLE if name != "commands"}


def test_a_package_imports_nothing_by_itself() -> None:
    """``partitioners`` is a registry, which plugins import from."""
    found = {path.parent.name: imports(path) for path in PACKAGE.glob("*/__init__.py")}
    assert {name for name, taken in found.items() if taken} <= {"partitioners"}


def test_imports_point_down() -> None:
    height = {module: PACKAGES.index(package_of(module)) for module in MODULES}
    upward = [
        f"{module} imports {name}"
        for module in MODULES
        for name in own_imports(module)
        if PACKAGES.index(package_of(name)) > height[module]
    ]
    assert upward == []


def test_imports_go_in_no_circle() -> None:
    order = TopologicalSorter({module: own_imports(module) for module in MODULES})
    order.prepare()  # raises CycleError


def test_only_the_mpi_transport_imports_mpi4py() -> None:
    users = [module for module in SOURCES if "mpi4py" in foreign_imports(module)]
    assert users == ["distributed.mpi"]


def test_a_part_that_needs_neither_imports_neither() -> None:
    light = [each for each in MODULES if NEEDS[package_of(each)] == "neither"]
    assert len(light) > 50
    assert [each for each in light if foreign_imports(each) & MLX_OR_MPI] == []


def run_without_mlx_and_mpi(program: str) -> subprocess.CompletedProcess[str]:
    block = f"import sys; sys.modules.update(dict.fromkeys({sorted(MLX_OR_MPI)}))"
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", f"{block}\n{program}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )


def test_the_parts_that_need_neither_and_the_commands_load_without_them() -> None:
    """A command must set up the process before MLX and MPI come in."""
    light = ("neither", "")
    names = [f"shardmlx.{each}" for each in MODULES if NEEDS[package_of(each)] in light]
    done = run_without_mlx_and_mpi(
        f"import importlib\nfor name in {names}: importlib.import_module(name)"
    )
    assert done.returncode == 0, done.stderr


SCHEDULE = ["--schedule", "zb-v", "--pipeline-stages", "2", "--micro-batches", "4"]


COMMANDS = [
    ("schedule", SCHEDULE, 0),
    ("plan", ["MODEL", "--hostfile", "hostfiles/two-macs", "--num-layers", "-1"], 0),
    ("inspect", ["MODEL"], 0),
    ("launch", ["--hostfile", "/nowhere", "train", "--test"], 2),
    ("doctor", ["--ssh", "--hostfile", "HOSTS"], 0),
]


def test_commands_for_a_laptop_run_without_them(tmp_path: Path) -> None:
    model = write(tmp_path / "model", model_files(TINY))
    hosts = tmp_path / "hosts"
    hosts.write_text("localhost slots=2\n")
    places = {"MODEL": str(model), "HOSTS": str(hosts)}
    given = [(name, [places.get(each, each) for each in argv]) for name, argv, _ in COMMANDS]
    done = run_without_mlx_and_mpi(
        "from shardmlx.main import main\n"
        f"for name, argv in {given}:\n"
        "    status = main([name, *argv])\n"
        "    sys.stdout.flush()\n"
        "    print(f'{name} ended with {status}', file=sys.stderr, flush=True)"
    )
    assert done.returncode == 0, done.stderr
    ends = re.findall(r"^(\w+) ended with (\d)$", done.stderr, re.MULTILINE)
    assert ends == [(name, str(status)) for name, _, status in COMMANDS]
    assert "Traceback" not in done.stderr
