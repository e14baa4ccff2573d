"""The benchmarks' command lines, what they make of numbers, and the small form of some."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from contextlib import suppress
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from scripts.bench.__main__ import TABLE, main, parser_of_all
from scripts.bench.benchmark import Benchmark, Spread
from scripts.bench.turns import by_turns
from tests.helpers.sources import ROOT, nodes

BENCH = ROOT / "scripts/bench"
FILES = sorted(BENCH.glob("*.py"))
OF_TORCH = "rivals"
"""The file that torch's Python runs."""


@pytest.mark.parametrize("benchmark", TABLE, ids=lambda each: each.name)
def test_every_benchmark_says_what_it_measures(
    benchmark: Benchmark, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main([benchmark.name, "--help"])
    assert end.value.code == 0
    said = capsys.readouterr().out
    assert said.startswith(f"usage: python -m scripts.bench {benchmark.name} ")
    assert benchmark.about in said


def test_the_list_has_each_benchmark_once(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    listed = re.findall(r"^    ([\w-]+)(?= |$)", capsys.readouterr().out, re.MULTILINE)
    assert listed == [each.name for each in TABLE]
    assert len(set(listed)) == len(listed)


def test_all_have_the_same_common_options() -> None:
    options = vars(parser_of_all().parse_args([TABLE[0].name, "--quick", "--only", "a", "b"]))
    assert (options["quick"], options["only"], options["json"]) == (True, ["a", "b"], None)
    for each in TABLE:
        assert vars(parser_of_all().parse_args([each.name])).keys() >= {"rounds", "markdown"}


def test_every_program_of_a_contender_can_be_imported() -> None:
    names = [path.stem for path in FILES if path.stem not in ("__init__", OF_TORCH)]
    code = "import importlib, sys\nfor name in sys.argv[1:]: importlib.import_module(name)"
    modules = [f"scripts.bench.{name}" for name in names]
    subprocess.run([sys.executable, "-c", code, *modules], cwd=ROOT, check=True, timeout=120)


def test_every_program_that_is_started_is_there() -> None:
    started = {
        name
        for path in FILES
        for name in re.findall(r"\bprogram\(\s*\"(\w+)\"", path.read_text(encoding="utf-8"))
    }
    assert {"loops", "rivals", "growth"} <= started <= {path.stem for path in FILES}


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["growth", "--only", "packing", "lookup"], r"packing 1,024 rows in 256, ms .*<= 15: yes"),
    ],
)
def test_a_small_form_runs(words: list[str], line: str, tmp_path: Path) -> None:
    output = tmp_path / "numbers.json"
    done = subprocess.run(
        [sys.executable, "-m", "scripts.bench", *words, "--quick", "--json", output],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert re.search(line, done.stdout), done.stdout
    assert output.exists()


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
    own = {"scripts", "testbed", *sys.stdlib_module_names}
    distributions = metadata.packages_distributions()
    packages = {
        name: {canonicalize_name(each) for each in distributions.get(name, [name])}
        for name in imported([*FILES]) - own
    }
    brought = brought_by("bench")
    assert "pytest" not in brought
    assert {name for name, of in packages.items() if not of & brought} == set()


def test_contenders_take_turns() -> None:
    order: list[str] = []

    def noted(name: str, result: int) -> int:
        order.append(name)
        return result

    results = by_turns({"a": lambda: noted("a", 1), "b": lambda: noted("b", 2)}, rounds=3)
    assert order == ["a", "b", "a", "b", "a", "b"]
    assert results == {"a": [1, 1, 1], "b": [2, 2, 2]}


def test_ratios_are_of_rounds() -> None:
    # The second round was slow for both.
    spread = Spread.of_ratios([2.0, 20.0, 2.2], [1.0, 10.0, 1.0])
    assert (spread.median, spread.least, spread.most) == (2.0, 2.0, 2.2)
    assert f"{spread:.1f}" == "2.0 (2.0-2.2)"
