"""Mutants: the changes that are made, and whether tests notice one."""

import importlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

SCRIPTS = Path(__file__).parents[3] / "scripts"

SOURCE = '''\
"""Text."""

def f(a: int = 2) -> int:
    """Text."""
    while a and a < 5 or a in (True,):
        a += 1
    if a:
        raise ValueError(f"{a + 1}", 7)
    return -a
'''


@pytest.fixture(scope="module")
def mutants() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(SCRIPTS)
        yield importlib.import_module("mutants")


def test_a_mutant_has_one_change_of_what_the_program_does(mutants: ModuleType) -> None:
    """Neither texts nor annotations nor arguments of errors are changed."""
    found = list(mutants.mutants(SOURCE))
    assert sorted(what for _, what, _ in found) == [
        "and: a and a < 5 or a in (True,)",
        "another comparison: a < 5",
        "another comparison: a in (True,)",
        "line 6 dropped: a += 1",
        "line 8 dropped: raise ValueError(f'{a + 1}', 7)",
        "line 9 dropped: return -a",
        "negated: if a:",
        "negated: while a and a < 5 or a in (True,):",
        "one more: 1",
        "one more: 2",
        "one more: 5",
        "or: a and a < 5",
        "the opposite: True",
        "without the sign: -a",
    ]
    assert len({text for _, _, text in found}) == len(found)
