"""``shardmlx.train --config F``, where another machine than rank 0's has another file F."""

import sys

from shardmlx.environment import launched_rank
from shardmlx.train import main

name = sys.argv[1] + (".other" if launched_rank() else "")
raise SystemExit(main(["--config", name, "--model", "/nowhere"]))
