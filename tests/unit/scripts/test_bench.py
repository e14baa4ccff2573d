"""The benchmarks' command lines, and what they make of numbers. Nothing is measured here."""

import ast
import importlib
import json
import pkgutil
import runpy
import sys
from collections.abc import Iterator
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

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
            helpers = [ROOT / f"{each.replace('.', '/')}.py" for each in modules if "tests" in each]
            files += [each for each in helpers if each not in files]
    return names


def test_the_benchmarks_need_only_what_their_extra_brings() -> None:
    own = {path.stem for path in BENCH.glob("*.py")} | {"tests"} | set(sys.stdlib_module_names)
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


def test_numbers_are_written_with_the_machine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    compare = load("_compare")
    file = tmp_path / "numbers.json"
    options = compare.parser_of("Measures nothing.").parse_args(["--quick", "--json", str(file)])
    table = compare.Table("Nothing", ("what",), [("of it",)])
    compare.publish(options, {"cores": 2}, [table], {"turns": {"a": [1.5]}})
    assert capsys.readouterr().out == "\nNothing\nwhat\nof it\n"
    report = json.loads(file.read_text())
    assert report["quick"] is True
    assert report["machine"]["cores"] == 2
    assert report["turns"] == {"a": [1.5]}


def test_contenders_rest_between_their_turns_and_answer_by_rank() -> None:
    turns = load("_turns")
    program = (
        "import os; from _turns import Turns; rank = int(os.environ['RANK']); turns = Turns(rank)\n"
        "turns.answer('warm')\n"
        "while True: turns.answer([rank, turns.rest()])"
    )
    path = {"PYTHONPATH": str(BENCH)}
    command = [sys.executable, "-c", program]
    contender = turns.Contender(
        "two processes",
        [command, command],
        ranks=2,
        environments=[{**path, "RANK": "1"}, {**path, "RANK": "0"}],
    )
    with turns.warmed_up([contender]):
        assert contender.warm_up == ["warm", "warm"]
        assert contender.turn(5) == [[0, 5], [1, 5]]
        assert contender.turn(6) == [[0, 6], [1, 6]]


def test_a_contender_that_fails_says_why() -> None:
    turns = load("_turns")
    with pytest.raises(SystemExit, match="broken failed:\nno such model"):
        turns.Contender("broken", [[sys.executable, "-c", "raise SystemExit('no such model')"]])


def test_what_is_timed_of_a_start_is_there() -> None:
    for path in load("_startup").PARTS:
        assert callable(pkgutil.resolve_name(f"shardmlx.{path}"))


def test_efficiency_is_against_one_rank_of_the_same_kind() -> None:
    pipeline = load("pipeline")
    seconds = {
        "plain MLX": [9.8, 9.9],
        "one rank": [10.0, 10.0],
        "1f1b 5/3": [5.5, 5.5],
        "zb-v 3/2/2/1": [5.0, 5.2],
        "torch one rank": [8.0, 8.0],
        "torch zb-v 3/2/2/1": [5.0, 5.0],
    }
    lines = {line[0]: line for line in pipeline.speed_table(pipeline.Work(), seconds).lines}
    assert lines["1f1b 5/3"] == (
        "1f1b 5/3", "5.500 (5.500-5.500) s", "745", "0.909 (0.909-0.909)", ">= 0.9: yes",
    )  # fmt: skip
    assert lines["torch zb-v 3/2/2/1"][3] == "0.800 (0.800-0.800)"
    assert lines["plain MLX"][4] == "one rank takes 1.015 (1.010-1.020) of it, <= 1.03: yes"
    best = pipeline.best_table(seconds).lines
    assert [line[0] for line in best[:2]] == ["zb-v 3/2/2/1", "torch zb-v 3/2/2/1"]
    assert best[2] == ("ours ahead of torch's by", "+0.181", ">= 0: yes")


def test_links_are_compared_size_by_size() -> None:
    results = [
        {"bytes": 1 << 20, "way": "raw", "flow": [1e-3, 1e-3], "ping_pong": [2e-3, 2e-3]},
        {"bytes": 1 << 20, "way": "transport", "flow": [1e-3, 1e-3], "ping_pong": [3e-3, 3e-3]},
    ]
    (line,) = load("transport").link_table({"TCP": results}).lines
    assert line == (
        "TCP", "1 MiB", "1.049", "1.049", "1.00 (1.00-1.00)", ">= 0.95: yes",
        "2000.0", "3000.0", "1.50 (1.50-1.50)", "<= 1.2: no",
    )  # fmt: skip


def test_the_time_of_a_start_is_told_phase_by_phase() -> None:
    milestones = {"Python": 100.5, "options": 101.0, "imports": 103.0, "MPI": 104.0}
    milestones |= {"prepared": 106.0, "first step": 107.0, "second step": 107.5}
    rank = {"milestones": milestones, "seconds": {"loading weights": 1.5}}
    start = load("startup").Start(100.0, [rank])
    assert start.total == 7.0
    assert list(start.phases(0).items()) == [
        ("mpirun, and Python's start", 0.5),
        ("options, OpenBLAS", 0.5),
        ("importing MLX, mlx-lm, shardmlx", 2.0),
        ("starting MPI, meeting the other rank", 1.0),
        ("preparing the run", 2.0),
        ("  loading weights", 1.5),
        ("  agreeing, waiting, the rest", 0.5),
        ("first step", 1.0),
        ("(second step)", 0.5),
    ]


def test_a_step_is_read_out_of_a_trace() -> None:
    def event(rank: int, category: str, name: str, start: float, seconds: float) -> dict[str, Any]:
        times = {"ts": start * 1e6, "dur": seconds * 1e6}
        return {"ph": "X", "pid": rank, "cat": category, "name": name, **times}

    events = [
        {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "rank 0 on a"}},
        event(0, "step", "batch 1", 0.0, 1.0),
        event(0, "step", "step 1", 1.0, 3.0),
        event(0, "compute", "0F0", 1.0, 1.0),
        event(0, "receive", "0RECV_B0", 2.0, 0.5),
        event(0, "send", "0SEND_F0", 2.0, 0.0),
        event(0, "compute", "0W0", 2.5, 1.0),
        event(0, "update", "optimizer", 3.5, 0.5),
        event(0, "compute", "0F0", 7.0, 1.0),
    ]
    step = load("draw_trace").read_step(events)
    assert (step.number, step.seconds) == (1, 3.0)
    assert [(box.what, box.start, box.end) for box in step.ranks["rank 0 on a"]] == [
        ("F forward", 0.0, 1.0),
        ("waiting for a message", 1.0, 1.5),
        ("W weight gradient", 1.5, 2.5),
        ("optimizer", 2.5, 3.0),
    ]
    with pytest.raises(SystemExit, match="the trace has the steps 1"):
        load("draw_trace").read_step(events, 2)
