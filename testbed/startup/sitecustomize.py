"""Let every Python that a test starts import mlx-lm sooner, and compute with the chosen device.

The garbage collector would go through all that mlx-lm's import makes, again and again,
transformers reads 3000 files of its own at each start, and dataclasses compile a thousand methods:
these take half of a start. Python imports this module by itself, from PYTHONPATH.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import marshal
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
    enabled = gc.isenabled()
    gc.disable()
    try:
        execute(module)
    finally:
        if enabled:  # a rank has disabled it until all is imported
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
        keep(file, pickle.dumps(table))
        return table

    module.define_import_structure = define  # type: ignore[attr-defined]


def with_kept_code(execute: Callable[[ModuleType], None], module: ModuleType) -> None:
    """Let dataclasses take the code of methods from a file, where an earlier start left it."""
    execute(module)
    file = CACHE / f"dataclasses-{sys.implementation.cache_tag}.marshal"
    code: dict[str, Any] = {}
    with contextlib.suppress(OSError, EOFError, ValueError, TypeError):
        code = marshal.loads(file.read_bytes())
    known = len(code)

    def run(text: str, *names: Any) -> None:
        if text not in code:
            code[text] = compile(text, "<string>", "exec")
        exec(code[text], *names)

    def keep_all() -> None:
        if len(code) > known:
            keep(file, marshal.dumps(code))

    module.exec = run  # type: ignore[attr-defined]
    atexit.register(keep_all)


def keep(file: Path, content: bytes) -> None:
    """Write a file for later starts. Hosts of a lab see the disk as it is, and write nothing."""
    with contextlib.suppress(OSError):
        CACHE.mkdir(exist_ok=True)
        own = file.with_suffix(f".{os.getpid()}")
        own.write_bytes(content)
        own.replace(file)


def on_device(execute: Callable[[ModuleType], None], module: ModuleType) -> None:
    """Let MLX compute with the device that pytest's ``--device`` names."""
    execute(module)
    if (device := os.environ.get("SHARDMLX_TEST_DEVICE")) is not None:
        mx: Any = module
        mx.set_default_device(getattr(mx, device))


CACHE = Path(__file__).resolve().parents[2] / ".cache"
RUN = {
    "dataclasses": with_kept_code,
    "mlx.core": on_device,
    "mlx_lm": without_collection,
    "transformers.utils.import_utils": with_kept_table,
}

sys.meta_path.insert(0, Finder())
# Libraries import these where they are installed: selenium brought the one, matplotlib the other,
# users have no need of them, and they take a tenth of the start. The tests themselves need them,
# and so do jobs that say so.
if __name__ == "sitecustomize" and "SHARDMLX_TEST_ALL_LIBRARIES" not in os.environ:
    for name in ("trio", "PIL"):
        sys.modules[name] = None  # type: ignore[assignment]
