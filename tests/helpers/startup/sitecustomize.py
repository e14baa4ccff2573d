"""Let every Python that a test starts import mlx-lm sooner.

The garbage collector would go through all that mlx-lm's import makes, again and again. Python
imports this module by itself, from PYTHONPATH.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType


class Finder:
    """Finds mlx-lm. No ``MetaPathFinder``: importing that takes as long as all of Python."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != "mlx_lm":
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            load = partial(without_collection, spec.loader.exec_module)
            spec.loader.exec_module = load  # type: ignore[method-assign]
        return spec


def without_collection(execute: Callable[[ModuleType], None], module: ModuleType) -> None:
    gc.disable()
    try:
        execute(module)
    finally:
        gc.enable()


sys.meta_path.insert(0, Finder())
# huggingface-hub's HTTP client imports trio where it is installed: selenium brought it, users have
# no need of it, and it takes a tenth of the start.
sys.modules["trio"] = None  # type: ignore[assignment]
