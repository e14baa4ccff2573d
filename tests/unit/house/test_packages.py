"""Imports point down only, package by package, and the package starts with neither MLX nor MPI."""

from __future__ import annotations

import ast
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PACKAGE = ROOT / "shardmlx"

PACKAGES = (
    "errors",
    "models",
    "common",
    "modelfiles",
    "distributed",
    "pipeline",
    "partitioners",
    "config",
    "engine",
    "costmodel",
    "checkpoint",
    "planning",
    "loading",
    "training",
    "hosts",
    "inference",
    "server",
)
"""From the bottom. What stands in none of them is a command, above all."""

NEITHER = {"mlx", "mlx_lm", "mpi4py"}


def sources() -> dict[str, Path]:
    """Module name without the leading ``shardmlx.`` -> file; ``""`` is the package itself."""
    files = {}
    for path in (
        PACKAGE.rglob("*.py", recurse_symlinks=True)
        if sys.version_info >= (3, 13)
        else (
            *PACKAGE.rglob("*.py"),
            *PACKAGE.glob("models/*.py"),
            *PACKAGE.glob("partitioners/*.py"),
        )
    ):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        files[".".join(part for part in parts if part != "__init__")] = path
    return files


SOURCES = sources()


def height(module: str) -> int:
    package = module.split(".")[0]
    return PACKAGES.index(package) if package in PACKAGES else len(PACKAGES)


def imports(path: Path) -> set[str]:
    """All modules that a file imports, anywhere in it, by their full names."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert node.module is not None
            # 'from shardmlx import options' names a module, 'from shardmlx.errors import X' none.
            submodules = {f"{node.module}.{alias.name}" for alias in node.names}
            ours = {each for each in submodules if each.removeprefix("shardmlx.") in SOURCES}
            names |= ours or {node.module}
    return names


def own_imports(module: str) -> set[str]:
    names = {name for name in imports(SOURCES[module]) if name.split(".")[0] == "shardmlx"}
    return {name.removeprefix("shardmlx").removeprefix(".") for name in names}


def foreign_imports(module: str) -> set[str]:
    return {name.split(".")[0] for name in imports(SOURCES[module])} - {"shardmlx"}


@pytest.mark.parametrize("module", sorted(SOURCES))
def test_imports_point_down(module: str) -> None:
    upward = {name for name in own_imports(module) if name and height(name) > height(module)}
    assert upward == set()


def test_imports_go_in_no_circle() -> None:
    order = TopologicalSorter({module: own_imports(module) - {module} for module in SOURCES})
    order.prepare()  # raises CycleError


def test_only_the_mpi_transport_imports_mpi4py() -> None:
    users = [module for module in SOURCES if "mpi4py" in foreign_imports(module)]
    assert users == ["distributed.mpi"]
