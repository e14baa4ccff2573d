"""``apart.py MODULE DIR,DIR,... ARGUMENTS``: a command of shardmlx on machines that share nothing:
each rank works in a directory of its own, with its own temporary files and caches.

SHARDMLX_TEST_OFFLINE names the ranks that reach no hub, SHARDMLX_TEST_BREAKS one whose disk fails.
"""

import os
import sys
from importlib import import_module
from pathlib import Path

from shardmlx.common.environment import launched_rank

module, homes, *arguments = sys.argv[1:]
rank = launched_rank()
home = Path(homes.split(",")[rank])
for name in ("HF_HOME", "XDG_CACHE_HOME", "TMPDIR"):
    path = home / name.lower()
    path.mkdir(parents=True, exist_ok=True)
    os.environ[name] = str(path)
os.chdir(home)
if str(rank) in os.environ.get("SHARDMLX_TEST_OFFLINE", "").split(","):
    os.environ["HF_ENDPOINT"] = "http://127.0.0.1:9"  # the port at which things are discarded


def fail(*_: object) -> None:
    raise OSError("the disk is gone")


if str(rank) == os.environ.get("SHARDMLX_TEST_BREAKS"):
    from shardmlx.loading.partial_copy import PartialCopy

    PartialCopy.write = fail  # type: ignore[assignment, method-assign]

if __name__ == "__main__":
    sys.exit(import_module(f"shardmlx.{module}").main(arguments))
