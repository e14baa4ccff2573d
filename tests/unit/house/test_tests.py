"""The tests mirror the tree, and share nothing but their helpers."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.helpers.sources import nodes

TESTS = Path(__file__).parents[2]
PACKAGE = TESTS.parent / "shardmlx"
FILES = sorted(TESTS.rglob("*.py"))

OF_NO_PACKAGE = {"commands", "house", "scripts"}
"""Directories of tests/unit for modules at the top, for what holds everywhere, and for scripts/."""


def imported(path: Path) -> set[str]:
    """Return the modules that a file imports, and names that may be modules."""
    names: set[str] = set()
    for node in nodes(path):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            assert node.level == 0, f"{path}: relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def test_no_test_imports_from_another() -> None:
    found = [
        f"{path.relative_to(TESTS)} imports {name}"
        for path in FILES
        for name in imported(path)
        if is_of_tests(name) and not name.startswith("tests.helpers.")
    ]
    assert len(FILES) > 100
    assert found == []


def test_scripts_and_what_they_share_with_tests_import_no_test() -> None:
    files = [path for top in ("scripts", "testbed") for path in (TESTS.parent / top).rglob("*.py")]
    assert len(files) > 20
    found = [path.name for path in files if any(map(is_of_tests, imported(path)))]
    assert found == []


def is_of_tests(module: str) -> bool:
    return module.split(".")[0] == "tests"


def test_files_of_one_name_are_told_apart_by_their_packages() -> None:
    directories = {path.parent for path in TESTS.rglob("test_*.py")}
    assert [each for each in directories if not (each / "__init__.py").exists()] == []


def test_every_package_has_its_directory_of_tests() -> None:
    packages = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    directories = {path.parent.name for path in TESTS.glob("unit/*/test_*.py")}
    assert directories == packages | OF_NO_PACKAGE


def test_no_example_of_hypothesis_has_a_time_limit() -> None:
    """By default it has 0.2 s, which a busy machine does not keep."""
    drawn = [
        (f"{path.relative_to(TESTS)}::{node.name}", "".join(map(ast.unparse, node.decorator_list)))
        for path in FILES
        if "@given" in path.read_text()
        for node in nodes(path)
        if isinstance(node, ast.FunctionDef)
    ]
    assert [name for name, how in drawn if "given(" in how and "deadline=None" not in how] == []
