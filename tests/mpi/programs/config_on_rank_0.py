"""``shardmlx.train --config F``, where F is on rank 0's machine only."""

import sys

from shardmlx.environment import launched_rank
from shardmlx.train import main

name = sys.argv[1] + (".missing" if launched_rank() else "")
raise SystemExit(main(["--config", name, "--model", "/nowhere"]))
