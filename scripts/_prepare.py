"""What the prepare_*.py scripts share: files out of packages, results that appear whole."""

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
    """Where an installed package keeps `path`, without importing the package.

    Raises UserError, with the remedy, where the package or the file is missing.
    """
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise UserError(f"the Python package {package} is not installed: {remedy}")
    file = Path(spec.submodule_search_locations[0], path)
    if not file.exists():
        raise UserError(f"the Python package {package} has no {path}: {remedy}")
    return file


def packaged_module(name: str, remedy: str) -> Any:
    """An installed module. Raises UserError, with the remedy, where it is missing."""
    if importlib.util.find_spec(name) is None:
        raise UserError(f"the Python package {name} is not installed: {remedy}")
    return importlib.import_module(name)


@contextmanager
def new_directory(output: Path) -> Iterator[Path]:
    """A directory to fill, beside `output`; it becomes `output` when the block ends well.

    Nobody ever sees `output` half written. On an error nothing is left behind.
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
    """True where `output` holds all `files`, False where there is nothing at all.

    Raises UserError where something else is in the way.
    """
    if all((output / name).is_file() for name in files):
        return True
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return False
    raise UserError(f"{output} is in the way: remove it or give another --output")


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write `content` as Hugging Face's libraries do."""
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False), encoding="utf-8")


def run(main: Callable[[], int]) -> int:
    """Exit status of `main`; what the user can mend becomes one line and status 2."""
    try:
        return main()
    except (UserError, OSError) as error:
        print(f"{Path(sys.argv[0]).name}: {error}", file=sys.stderr)
        return 2
