"""Spare every Python that a test starts more than half of its start.

transformers, which mlx-lm imports, reads each of its 3 300 files at import, twice, to know what its
models export. What it found is kept here, and the next process takes it as it is. Nor does the
garbage collector go through all that mlx-lm's import makes, again and again. Python imports this
module by itself, from PYTHONPATH. Where transformers has changed inside, nothing happens.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import marshal
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

CACHE = Path(__file__).resolve().parents[3] / ".cache" / "transformers"
TRANSFORMERS, FUNCTION = "transformers.utils.import_utils", "create_import_structure_from_path"
MLX_LM = "mlx_lm"


class Finder:
    """Finds two modules, each once: a function of the one remembers, the other is imported without
    garbage collection. No ``MetaPathFinder``: importing that takes as long as all of Python."""

    def __init__(self) -> None:
        self._names = {TRANSFORMERS, MLX_LM}

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in self._names:
            return None
        self._names.remove(name)
        spec = PathFinder.find_spec(name, path)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module
        change = without_collection if name == MLX_LM else with_memory
        spec.loader.exec_module = partial(change, execute)  # type: ignore[method-assign]
        return spec


def without_collection(execute: Callable[[ModuleType], None], module: ModuleType) -> None:
    gc.disable()
    try:
        execute(module)
    finally:
        gc.enable()


def with_memory(execute: Callable[[ModuleType], None], module: ModuleType) -> None:
    execute(module)
    if hasattr(module, FUNCTION):
        setattr(module, FUNCTION, remembering(getattr(module, FUNCTION), module))


def remembering(function: Callable[[Any], Any], module: ModuleType) -> Callable[[Any], Any]:
    """Return the function with its results in files; those of its calls of itself are in them."""
    home = Path(module.__file__ or "").parents[1]
    changed = (home / "__init__.py").stat().st_mtime_ns

    def remember(path: Any) -> Any:
        key = f"{home} {changed} {path} {sys.version}"
        file = CACHE / hashlib.sha256(key.encode()).hexdigest()
        with contextlib.suppress(OSError, ValueError, EOFError, TypeError):
            return marshal.loads(file.read_bytes())
        setattr(module, FUNCTION, function)
        try:
            found = function(path)
        finally:
            setattr(module, FUNCTION, remember)
        with contextlib.suppress(OSError, ValueError):
            CACHE.mkdir(parents=True, exist_ok=True)
            unfinished = file.with_suffix(f".{os.getpid()}")
            unfinished.write_bytes(marshal.dumps(found))
            unfinished.replace(file)
        return found

    return remember


sys.meta_path.insert(0, Finder())
# huggingface-hub's HTTP client imports trio where it is installed: selenium brought it, users have
# no need of it, and it takes a tenth of the start.
sys.modules["trio"] = None  # type: ignore[assignment]
