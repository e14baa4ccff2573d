"""``apart.py MODULE DIR,DIR,... [NAME=VALUE ...] ARGUMENTS``: a command of shardmlx on machines
that share nothing: each rank works in a directory of its own, with its own temporary files and
caches. huggingface-hub reads the environment when it is imported, so each command imports it anew.

SHARDMLX_TEST_OFFLINE names the ranks that reach no hub, SHARDMLX_TEST_BREAKS one whose disk fails.
"""

import os
import sys
import tempfile
from pathlib import Path

from shardmlx.common.environment import launched_rank
from shardmlx.main import main as run


def forget() -> None:
    """Have the environment read again, where these ranks run other programs before and after."""
    tempfile.tempdir = None
    for name in list(sys.modules):
        if name.partition(".")[0] == "huggingface_hub":
            del sys.modules[name]


def fail(*_: object) -> None:
    raise OSError("the disk is gone")


def main(module: str, homes: str, *arguments: str) -> int:
    rank = launched_rank()
    home = Path(homes.split(",")[rank])
    while arguments and arguments[0].partition("=")[0].isupper():
        name, _, value = arguments[0].partition("=")
        os.environ[name] = value
        arguments = arguments[1:]
    for name in ("HF_HOME", "XDG_CACHE_HOME", "TMPDIR"):
        path = home / name.lower()
        path.mkdir(parents=True, exist_ok=True)
        os.environ[name] = str(path)
    os.chdir(home)
    if str(rank) in os.environ.get("SHARDMLX_TEST_OFFLINE", "").split(","):
        os.environ["HF_ENDPOINT"] = "http://127.0.0.1:9"  # the port at which things are discarded
    if str(rank) == os.environ.get("SHARDMLX_TEST_BREAKS"):
        from shardmlx.loading.partial_copy import PartialCopy

        PartialCopy.write = fail  # type: ignore[assignment, method-assign]
    forget()
    try:
        return run([module, *arguments])
    finally:
        forget()


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
