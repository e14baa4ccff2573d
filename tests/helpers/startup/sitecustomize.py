"""Spare every Python that a test starts more than half of its start.

transformers, which mlx-lm imports, reads each of its 3 300 files at import, twice, to know what its
models export. What it found is kept here, and the next process takes it as it is. Python imports
this module by itself, from PYTHONPATH. Where transformers has changed inside, nothing happens.
"""

from __future__ import annotations

import contextlib
import hashlib
import marshal
import os
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

CACHE = Path(__file__).resolve().parents[3] / ".cache" / "transformers"
MODULE, FUNCTION = "transformers.utils.import_utils", "create_import_structure_from_path"


class Finder(MetaPathFinder):
    """Finds the module once, and lets its function remember."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != MODULE:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(name, path)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_patch(module: ModuleType) -> None:
            execute(module)
            if hasattr(module, FUNCTION):
                setattr(module, FUNCTION, remembering(getattr(module, FUNCTION), module))

        spec.loader.exec_module = execute_and_patch  # type: ignore[method-assign]
        return spec


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
            partial = file.with_suffix(f".{os.getpid()}")
            partial.write_bytes(marshal.dumps(found))
            partial.replace(file)
        return found

    return remember


sys.meta_path.insert(0, Finder())
# huggingface-hub's HTTP client imports trio where it is installed: selenium brought it, users have
# no need of it, and it takes a tenth of the start.
sys.modules["trio"] = None  # type: ignore[assignment]
