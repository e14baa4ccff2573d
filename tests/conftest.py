"""Sets the process up before any test module imports MLX, as the commands of shardmlx do."""

import os

import pytest

from shardmlx.environment import prepare

prepare()


@pytest.fixture(scope="session", autouse=True)
def _caches(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What runs keep for later runs does not get into anybody's home."""
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("caches"))
