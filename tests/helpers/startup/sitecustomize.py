"""Let every Python that a test starts import mlx-lm sooner, and compute with the chosen device.

The garbage collector would go through all that mlx-lm's import makes, again and again, and
transformers reads 3000 files of its own at each start. Python imports this module by itself, from
PYTHONPATH.
"""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import sys
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any


class Finder:
    """Finds some modules, whose code is then run by a function of ``RUN``. No ``MetaPathFinder``:
    importing that takes as long as all of Python."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        run = RUN.get(name)
        if run is None:
            return None
        spec = PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            spec.loader.exec_module = partial(run, spec.loader.exec_module)  # type: ignore[method-assign]
        return spec


def without_collection(execute: Callable[[ModuleType], None], module: ModuleType) -> None:
    gc.disable()
    try:
        execute(module)
    finally:
        gc.enable()


def with_kept_table(execute: Callable[[ModuleType], None], module: ModuleType) -> None:
    """Let transformers take the table of its models from a file, where an earlier start left it."""
    execute(module)
    make: Any = module.define_import_structure

    def define(path: str | Path, prefix: str | None = None) -> Any:
        asked = f"{path} {prefix} {os.stat(path).st_mtime_ns}".encode()
        file = CACHE / f"transformers-{zlib.crc32(asked):08x}.pickle"
        with contextlib.suppress(OSError, EOFError, pickle.UnpicklingError):
            return pickle.loads(file.read_bytes())
        table = make(path, prefix)
        with contextlib.suppress(OSError):  # hosts of a lab see the disk as it is
            CACHE.mkdir(exist_ok=True)
            own = file.with_suffix(f".{os.getpid()}")
            own.write_bytes(pickle.dumps(table))
            own.replace(file)
        return table

    module.define_import_structure = define  # type: ignore[attr-defined]


def on_device(execute: Callable[[ModuleType], None], module: ModuleType) -> None:
    """Let MLX compute with the device that pytest's ``--device`` names."""
    execute(module)
    if (device := os.environ.get("SHARDMLX_TEST_DEVICE")) is not None:
        mx: Any = module
        mx.set_default_device(getattr(mx, device))


CACHE = Path(__file__).resolve().parents[3] / ".cache"
RUN = {
    "mlx.core": on_device,
    "mlx_lm": without_collection,
    "transformers.utils.import_utils": with_kept_table,
}

sys.meta_path.insert(0, Finder())
# huggingface-hub's HTTP client imports trio where it is installed: selenium brought it, users have
# no need of it, and it takes a tenth of the start.
sys.modules["trio"] = None  # type: ignore[assignment]
