"""Take files out of Python packages and make directories that appear whole, for prepare_*.py."""

import importlib
import importlib.util
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shardmlx.errors import UserError


def packaged_file(package: str, path: str, remedy: str) -> Path:
    """Return the path of a file of an installed package, without importing the package.

    Raises UserError, with the remedy, if the package or the file is missing.
    """
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise UserError(f"the Python package {package} is not installed: {remedy}")
    file = Path(spec.submodule_search_locations[0], path)
    if not file.exists():
        raise UserError(f"the Python package {package} has no {path}: {remedy}")
    return file


def packaged_module(name: str, remedy: str) -> Any:
    """Import and return a module. Raises UserError, with the remedy, if it is not installed."""
    if importlib.util.find_spec(name) is None:
        raise UserError(f"the Python package {name} is not installed: {remedy}")
    return importlib.import_module(name)


@contextmanager
def new_directory(output: Path) -> Iterator[Path]:
    """Give a directory to fill, beside `output`; rename it to `output` when the block ends well.

    Nobody ever sees `output` half written. An error leaves nothing behind.
    """
    draft = output.parent / f".{output.name}.{os.getpid()}"
    output.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir()
    try:
        yield draft
        draft.rename(output)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def already_there(output: Path, files: tuple[str, ...]) -> bool:
    """Return True if `output` holds all `files`, False if it is missing or empty.

    Raises UserError if something else is in the way.
    """
    if all((output / name).is_file() for name in files):
        return True
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return False
    raise UserError(f"{output} is in the way: remove it or give another --output")


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write `content` as JSON, in the format of Hugging Face's libraries."""
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False), encoding="utf-8")


def run(main: Callable[[], int]) -> int:
    """Return the exit status of `main`; an error of the user prints one line and gives status 2."""
    try:
        return main()
    except (UserError, OSError) as error:
        print(f"{Path(sys.argv[0]).name}: {error}", file=sys.stderr)
        return 2
