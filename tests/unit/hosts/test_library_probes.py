"""Parts of libraries that an update has broken are named, with the version that was tried."""

from __future__ import annotations

from importlib.metadata import version

from shardmlx import compat
from shardmlx.hosts.findings import BrokenPart
from shardmlx.hosts.library_probes import broken_parts


def fails() -> bool:
    raise AttributeError("it is gone")


def of_no_library_here() -> None:
    """Return nothing.

    no-such-library 1.0: not installed, so nothing of it can be broken.
    """


def test_what_is_false_or_raises_is_broken() -> None:
    probes = {
        compat.view_of: lambda: True,
        compat.random_key: lambda: False,
        compat.hub_transport_error: fails,
        of_no_library_here: fails,
    }
    assert list(broken_parts(probes)) == [
        BrokenPart("random_key", "mlx", version("mlx"), "0.32.4"),
        BrokenPart("hub_transport_error", "huggingface-hub", version("huggingface-hub"), "2.4"),
    ]
