"""The benchmarks' command lines, and what they make of numbers. Nothing is measured here."""

import ast
import importlib
import pkgutil
import re
import runpy
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.helpers.sources import ROOT, nodes

BENCH = ROOT / "scripts/bench"
SCRIPTS = sorted(path.stem for path in BENCH.glob("[!_]*.py"))


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As when a script there is run; afterwards the names are free again."""
    monkeypatch.syspath_prepend(str(BENCH))
    yield
    for path in BENCH.glob("*.py"):
        sys.modules.pop(path.stem, None)


def load(name: str) -> ModuleType:
    return importlib.import_module(name)


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_script_says_what_it_measures(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--help"])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(BENCH / f"{name}.py"), run_name="__main__")
    assert end.value.code == 0
    assert f"usage: {name}.py" in capsys.readouterr().out


def brought_by(extra: str) -> set[str]:
    """Return the packages that ``pip install '.[EXTRA]'`` brings, and those that these need."""
    brought: set[str] = set()
    todo = ["shardmlx"]
    while todo:
        package = todo.pop()
        if package in brought:
            continue
        brought.add(package)
        with suppress(metadata.PackageNotFoundError):  # torch is not in the tests' environment
            for line in metadata.requires(package) or ():
                needed = Requirement(line)
                chosen = {"extra": extra if package == "shardmlx" else ""}
                if needed.marker is None or needed.marker.evaluate(chosen):
                    todo.append(canonicalize_name(needed.name))
    return brought


def imported(files: list[Path]) -> set[str]:
    """Return the first names of all modules that files import, and that their helpers do."""
    names: set[str] = set()
    for path in files:
        for node in nodes(path):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            modules += [str(node.module)] if isinstance(node, ast.ImportFrom) else []
            names |= {module.partition(".")[0] for module in modules}
            helpers = [
                ROOT / f"{each.replace('.', '/')}.py" for each in modules if "testbed" in each
            ]
            files += [each for each in helpers if each not in files]
    return names


def test_the_benchmarks_need_only_what_their_extra_brings() -> None:
    own = {path.stem for folder in (BENCH, BENCH.parent) for path in folder.glob("*.py")}
    own |= {"testbed"} | set(sys.stdlib_module_names)
    distributions = metadata.packages_distributions()
    packages = {
        name: {canonicalize_name(each) for each in distributions.get(name, [name])}
        for name in imported(list(BENCH.glob("*.py"))) - own
    }
    brought = brought_by("bench")
    assert "pytest" not in brought
    assert {name for name, of in packages.items() if not of & brought} == set()


def test_contenders_take_turns() -> None:
    order: list[str] = []

    def noted(name: str, result: int) -> int:
        order.append(name)
        return result

    results = load("_compare").by_turns(
        {"a": lambda: noted("a", 1), "b": lambda: noted("b", 2)}, rounds=3
    )
    assert order == ["a", "b", "a", "b", "a", "b"]
    assert results == {"a": [1, 1, 1], "b": [2, 2, 2]}


def test_ratios_are_of_rounds() -> None:
    # The second round was slow for both.
    spread = load("_compare").Spread.of_ratios([2.0, 20.0, 2.2], [1.0, 10.0, 1.0])
    assert (spread.median, spread.least, spread.most) == (2.0, 2.0, 2.2)
    assert f"{spread:.1f}" == "2.0 (2.0-2.2)"


def test_what_is_timed_of_a_start_is_there() -> None:
    for path in load("_startup").PARTS:
        assert callable(pkgutil.resolve_name(f"shardmlx.{path}"))


def test_the_page_of_techniques_has_the_figures_of_the_formulas() -> None:
    formulas = load("which_parallelism")
    page = (ROOT / "docs/which-parallelism.md").read_text(encoding="utf-8").splitlines()
    wanted = {**formulas.costs(), **{name: [cells] for name, cells in formulas.speedups().items()}}
    for name, figures in wanted.items():
        rows = [line for line in page if re.match(rf"\|[\s*\[]*{name}", line)]
        assert [each for each in figures if not any(each in row for row in rows)] == [], name


def test_a_relay_delays_bytes_both_ways() -> None:
    (near, left), (right, far) = socket.socketpair(), socket.socketpair()
    ends, delay = (left, right), 0.05
    with near, far, left, right:
        thread = threading.Thread(target=load("_relay").relay, args=(ends, delay))
        thread.start()
        for sender, receiver in ((near, far), (far, near)):
            start = time.perf_counter()
            sender.sendall(b"a sum")
            assert receiver.recv(16) == b"a sum"
            assert time.perf_counter() - start >= delay - load("_relay").OWN
        near.shutdown(socket.SHUT_WR)
        thread.join(10)
        assert not thread.is_alive()
