"""Under mpirun a step is the step of one process, as it is on threads: loss and every gradient."""

from __future__ import annotations

import pytest

from tests.helpers import engine_checks
from tests.helpers.mpirun import run_checks, verdict


@pytest.fixture(scope="module")
def errors(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, str]]:
    return {
        size: run_checks(size, engine_checks.__name__, tmp_path_factory.mktemp("engine"))
        for size in (2, 4)
    }


@pytest.mark.parametrize(
    ("size", "name"), [(size, name) for size in (2, 4) for name in engine_checks.checks(size)]
)
def test_loss_and_gradients_are_those_of_one_process(
    size: int, name: str, errors: dict[int, dict[str, str]]
) -> None:
    verdict(errors[size], name)
