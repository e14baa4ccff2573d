"""What serving needs beside what the package needs anyway."""

from __future__ import annotations

from importlib.util import find_spec

from shardmlx.errors import UserError

PACKAGES = ("starlette", "uvicorn", "pydantic", "prometheus_client")


def check_packages() -> None:
    """``UserError`` where one is missing."""
    missing = [name for name in PACKAGES if find_spec(name) is None]
    if missing:
        raise UserError(f'serving needs {", ".join(missing)}: pip install "shardmlx[serve]"')
