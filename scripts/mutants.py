"""Change the product in small ways, and see which changes the unit tests of that room notice.

    python scripts/mutants.py shardmlx/pipeline/lowering.py tests/unit/pipeline

Each mutant is the file with one change: another comparison, operator or constant, a negated test,
``or`` for ``and``, a statement dropped. The tests run in a fork, in which the module is imported
from the mutant's text. A mutant is killed by a test that fails, by ``--seconds`` of CPU, or by five
times as many on the clock, where it waits for ever. The survivors are printed: each is a change
that no test notices, or that changes nothing. Texts of errors, annotations and docstrings stay as
they are. ``--most`` tries some mutants, drawn by the seed; ``--line`` only those of some lines.
Tests that start processes of their own do not see the mutant there. Returns 1 if the tests fail
without a change.
"""

from __future__ import annotations

import _root

import ast
import contextlib
import copy
import importlib.abc
import importlib.util
import os
import random
import resource
import signal
import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import hypothesis.strategies  # noqa: F401 - here, so that no fork takes the time
import numpy  # noqa: F401
import pytest
from _soaking import parser_of

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}

OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
}

DROPPED = (ast.AugAssign, ast.Break, ast.Continue, ast.Delete, ast.Expr, ast.Raise, ast.Return)

OPTIONS = ("-x", "-q", "-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning")
"""Options of pytest, which would warn of plugins' modules that are imported already."""

BLOCKS = ("body", "orelse")

Mutant = tuple[int, str, str]
"""A line, what is different there, and the text of the whole file."""


def mutants(source: str) -> Iterator[Mutant]:
    """Yield all mutants of a file."""
    tree = ast.parse(source)
    kept = {id(node) for part in _unread(tree) for node in ast.walk(part)}
    for place, node in enumerate(ast.walk(tree)):
        if id(node) in kept:
            continue
        text = ast.unparse(node).partition("\n")[0]
        for what, field, value in _changes(node):
            mutant = copy.deepcopy(tree)
            setattr(list(ast.walk(mutant))[place], field, value)
            changed = ast.unparse(ast.fix_missing_locations(mutant))
            if field not in BLOCKS:
                what = f"{what}: {text}"
            yield getattr(node, "lineno", 0), what, changed


def _unread(tree: ast.Module) -> Iterator[ast.AST]:
    """Yield the parts that say something to people or to mypy alone, and imports."""
    for node in ast.walk(tree):
        match node:
            case ast.Expr(value=ast.Constant()) | ast.Import() | ast.ImportFrom() | ast.JoinedStr():
                yield node
            case ast.Raise(exc=ast.Call() as call):
                yield call
            case (
                ast.AnnAssign(annotation=annotation) | ast.arg(annotation=ast.expr() as annotation)
            ):
                yield annotation
            case ast.FunctionDef(returns=ast.expr() as returns):
                yield returns
            case ast.Call(func=ast.Name(id="dataclass" | "zip" | "TypeVar"), keywords=keywords):
                yield from keywords


Change = tuple[str, str, object]
"""What is different, and the field of a node that gets another value."""


def _changes(node: ast.AST) -> Iterator[Change]:
    """Yield all changes of one node."""
    yield from _changes_of_tests(node)
    match node:
        case ast.BinOp(op=operator) if type(operator) in OPERATORS:
            yield "another operator", "op", OPERATORS[type(operator)]()
        case ast.Constant(value=bool(value)):
            yield "the opposite", "value", not value
        case ast.Constant(value=int(value) | float(value)):
            yield "one more", "value", value + 1
        case ast.UnaryOp(op=ast.USub()):
            yield "without the sign", "op", ast.UAdd()
    for field in BLOCKS:
        block: Any = getattr(node, field, None)
        for place, statement in enumerate(block if isinstance(block, list) else []):
            if _can_be_dropped(statement):
                what = f"line {statement.lineno} dropped: {ast.unparse(statement)}"
                yield what, field, [*block[:place], ast.Pass(), *block[place + 1 :]]


def _changes_of_tests(node: ast.AST) -> Iterator[Change]:
    match node:
        case ast.Compare(ops=ops):
            for place, old in enumerate(ops):
                yield (
                    "another comparison",
                    "ops",
                    [
                        *ops[:place],
                        COMPARISONS[type(old)](),
                        *ops[place + 1 :],
                    ],
                )
        case ast.BoolOp(op=ast.And()):
            yield "or", "op", ast.Or()
        case ast.BoolOp():
            yield "and", "op", ast.And()
        case ast.If(test=test) | ast.IfExp(test=test) | ast.While(test=test):
            if not isinstance(test, ast.Compare):
                yield "negated", "test", ast.UnaryOp(ast.Not(), test)


def _can_be_dropped(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.Assign):
        return not all(isinstance(target, ast.Name) for target in statement.targets)
    is_text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    return isinstance(statement, DROPPED) and not is_text


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports one module from a text."""

    def __init__(self, name: str, path: Path, source: str) -> None:
        self._name = name
        self._code = compile(source, str(path), "exec")

    def find_spec(self, name: str, path: object, target: object = None) -> ModuleSpec | None:
        return importlib.util.spec_from_loader(name, self) if name == self._name else None

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        exec(self._code, vars(module))


def survives(path: Path, source: str, tests: Sequence[str], seconds: int) -> bool:
    """Return whether the tests pass with this text in the place of a file's, in a fork."""
    name = ".".join(path.with_suffix("").parts)
    pid = os.fork()
    if pid == 0:
        status = 1
        with contextlib.suppress(BaseException):
            os.setsid()
            resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 2))
            signal.alarm(5 * seconds)
            null = os.open(os.devnull, os.O_RDWR)
            for stream in (0, 1, 2):
                os.dup2(null, stream)
            sys.meta_path.insert(0, _Finder(name, path, source))
            status = int(pytest.main([*OPTIONS, *tests]))
        os._exit(status)
    return os.waitpid(pid, 0)[1] == 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__ or "")
    parser.add_argument("file", type=Path, help="of the product, from the root of the repository")
    parser.add_argument("tests", nargs="+", help="files or directories of tests")
    parser.add_argument("--seconds", type=int, default=60, help="of CPU for a mutant's tests")
    parser.add_argument("--most", type=int, help="number of mutants; all by default")
    parser.add_argument("--line", type=int, nargs="+", help="lines of which to try the mutants")
    options = parser.parse_args(arguments)
    os.chdir(_root.ROOT)
    source = options.file.read_text(encoding="utf-8")
    if not survives(options.file, source, options.tests, options.seconds):
        print(f"{options.file}: its tests fail without a change")
        return 1
    found = [each for each in mutants(source) if options.line is None or each[0] in options.line]
    if options.most is not None:
        found = random.Random(options.seed).sample(found, min(options.most, len(found)))
    survivors = 0
    for line, what, text in found:
        if survives(options.file, text, options.tests, options.seconds):
            survivors += 1
            print(f"{options.file}:{line}: {what}", flush=True)
    print(f"{options.file}: {len(found) - survivors} of {len(found)} mutants killed", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
