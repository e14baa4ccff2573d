"""Sets the process up before any test module imports MLX, as the commands of shardmlx do."""

import fcntl
import gc
import os
import signal
import ssl
import sys
import warnings
from collections.abc import Generator, Iterator
from contextlib import contextmanager, nullcontext
from functools import lru_cache
from typing import Any

import httpx
import pytest

from shardmlx.common.environment import prepare
from testbed.jobs import CACHE
from tests.helpers.rank_pool import close_pools

os.environ["XDG_CACHE_HOME"] = str(CACHE)
# Compiled once, also without scripts/test.sh: every rank that a test starts reads the modules anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
if sys.pycache_prefix is None:
    sys.pycache_prefix = os.environ["PYTHONPYCACHEPREFIX"] = str(CACHE / "python")
os.environ["HYPOTHESIS_NO_PLUGINS"] = "1"  # they import trio
# Apple's M5 and CUDA multiply float32 in ten bits else, as MLX's own tests know.
os.environ["MLX_ENABLE_TF32"] = "0"
prepare()

# The first lets this process too import mlx-lm sooner, as the others do then.
pytest_plugins = [
    "testbed.startup.sitecustomize",
    "tests.helpers.small_models",
    "tests.helpers.lab",
]


def pytest_addoption(parser: pytest.Parser) -> None:
    what = "what MLX computes with, in this process and in all that tests start"
    parser.addoption("--device", choices=("auto", "cpu", "gpu"), default="auto", help=what)


def pytest_configure(config: pytest.Config) -> None:
    """Set the device before any test module is imported; jobs take it from the environment."""
    device = config.getoption("--device")
    if device != "auto":
        import mlx.core as mx

        os.environ["SHARDMLX_TEST_DEVICE"] = device
        mx.set_default_device(getattr(mx, device))


# On a busy machine a server of this process may answer after more than httpx's five seconds.
for _what in ("connect", "read", "write", "pool"):
    setattr(httpx._config.DEFAULT_TIMEOUT_CONFIG, _what, 60.0)

# A shell starts what it runs in the background without Ctrl-C and Ctrl-\; jobs of tests would
# inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGQUIT, signal.SIG_DFL)


POOLED = """
    api bad_input best cells chat engine_mpi evaluate export failing_saves generate layouts
    nonfinite outputs own_loop preferences profile resume same_as_mlx_lm stragglers tensor_shares
    transport weights zero
"""
"""Tests in tests/mpi whose ranks stay between them: each rank more takes two seconds to start."""

ONE_AT_A_TIME = {
    "tests/browser/": "browser",  # a port range
    "tests/lab/": "lab",  # network namespaces
    "tests/unit/house/": "house",  # sources that are parsed once
    **{f"tests/mpi/test_{name}.py": "ranks that stay" for name in POOLED.split()},
}
"""What is shared by tests whose names begin so."""


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """Spare later garbage collections all that lives when the tests are collected. Of several
    workers one goes ahead, and compiles what the others then import."""
    gc.disable()
    try:
        with _first_alone() if hasattr(session.config, "workerinput") else nullcontext():
            return (yield)
    finally:
        gc.freeze()
        gc.enable()


@contextmanager
def _first_alone() -> Iterator[None]:
    CACHE.mkdir(exist_ok=True)
    with (CACHE / "collecting").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            fcntl.flock(file, fcntl.LOCK_SH)
        yield


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish() -> None:
    """Let Hypothesis, where it is imported only now, find who refers to what."""
    if "hypothesis" not in sys.modules:
        gc.unfreeze()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> Generator[None]:
    """Mix, for several workers, the files whose tests start jobs, and wait for most of their time,
    with those whose tests compute: so the cores are busy all along."""
    # Hypothesis asks each module for its file, and would so load what mlx-lm leaves for later.
    for service in ("wandb", "swanlab"):
        sys.modules.pop(service, None)
    yield
    if not hasattr(config, "workerinput"):
        return
    files = {item.location[0]: None for item in items}
    units = [file for file in files if file.startswith("tests/unit/")]
    jobs = [file for file in files if file not in units]
    place = {file: i / len(kind) for kind in (jobs, units) for i, file in enumerate(kind)}
    items.sort(key=lambda item: place[item.location[0]])


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Divide the tests among the workers of pytest-xdist: each file, or what shares something,
    to one."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduler(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            shared = (what for each, what in ONE_AT_A_TIME.items() if nodeid.startswith(each))
            return next(shared, nodeid.partition("::")[0])

    return Scheduler(config, log)


@pytest.fixture(scope="session", autouse=True)
def _caches(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Keep what runs leave for later runs out of anybody's home."""
    caches = tmp_path_factory.mktemp("caches")
    os.environ["XDG_CACHE_HOME"] = str(caches)


@pytest.fixture(scope="module", autouse=True)
def _what_other_files_left() -> None:
    """Spare the collections of this file's tests what lives since those of earlier files: where a
    test collects by itself, it would go through all of that each time."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always", ResourceWarning)
        gc.collect()
    gc.freeze()
    for each in found:
        # No fault of this file: said at the end of the run, and not an error here.
        warnings.warn(f"left open by an earlier file: {each.message}", stacklevel=1)


@pytest.fixture(scope="session", autouse=True)
def _certificates() -> None:
    """Read those of the world once, not in 70 ms for each of httpx's calls: none needs them."""
    ssl.create_default_context = lru_cache(ssl.create_default_context)  # type: ignore[assignment]


@pytest.fixture(scope="session", autouse=True)
def _pools() -> Iterator[None]:
    """End the ranks that have stayed for later tests."""
    yield
    close_pools()
