"""The table of transformers' models, kept from one start of a process to the next.

mlx-lm imports transformers, which at each start reads some 3000 files of its own, twice, to know
which class is where: more than half of the time until mlx-lm is there.
"""

from __future__ import annotations

import contextlib
import json
import os
import zlib
from collections.abc import Callable
from pathlib import Path

from shardmlx.compat import wrap_table_of_transformers

Table = dict[frozenset[str], dict[str, set[str]]]
"""Names of classes by their modules, and those by the libraries that they need."""


def keep_model_table(directory: Callable[[], Path]) -> None:
    """Let transformers, when it is imported, take its table from a file in ``directory()``.

    A file is good for one version at one place. Where none can be read or written, the table is
    made as without it.
    """

    def wrap(make: Callable[..., Table]) -> Callable[..., Table]:
        def define(path: Path | str, prefix: str | None = None) -> Table:
            folder = Path(path).parent if Path(path).name == "__init__.py" else Path(path)
            # Packages of single models are small.
            table = _kept(make, folder, directory) if folder.name == "models" else make(path)
            if prefix is None:
                return table
            return {
                needs: {f"{prefix}.{module}": names for module, names in modules.items()}
                for needs, modules in table.items()
            }

        return define

    wrap_table_of_transformers(wrap)


def _kept(make: Callable[..., Table], folder: Path, directory: Callable[[], Path]) -> Table:
    from importlib.metadata import version  # most commands need neither

    release = version("transformers")
    if "dev" in release:  # its files change under one name
        return make(str(folder))
    place = zlib.crc32(str(folder).encode())
    try:
        file = directory() / f"transformers-{release}-{place:08x}.json"
    except RuntimeError:  # no home
        return make(str(folder))
    with contextlib.suppress(OSError, ValueError, TypeError, AttributeError):
        return {
            frozenset(needs): {module: set(names) for module, names in modules.items()}
            for needs, modules in json.loads(file.read_bytes())
        }
    table = make(str(folder))
    rows = [
        [sorted(needs), {module: sorted(names) for module, names in modules.items()}]
        for needs, modules in table.items()
    ]
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_suffix(f".{os.getpid()}")
        partial.write_text(json.dumps(rows))
        partial.replace(file)
    return table
