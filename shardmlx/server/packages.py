"""The packages of the ``serve`` extra."""

from __future__ import annotations

from importlib.util import find_spec

from shardmlx.errors import UserError

PACKAGES = ("starlette", "uvicorn", "pydantic", "prometheus_client")


def check_packages() -> None:
    """Raise ``UserError`` unless all packages of the ``serve`` extra are installed."""
    missing = [name for name in PACKAGES if find_spec(name) is None]
    if missing:
        names = [name.replace("_", "-") for name in missing]
        raise UserError(f"serving needs {', '.join(names)}", f"pip install {' '.join(names)}")
