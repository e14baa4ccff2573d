"""``train_apart.py DIR,DIR,... ARGUMENTS``: ``shardmlx.train`` without a shared disk: each rank
works in a directory of its own."""

import os
import sys
from pathlib import Path

from shardmlx.common.environment import launched_rank
from shardmlx.main import main

home = Path(sys.argv[1].split(",")[launched_rank()])
home.mkdir(parents=True, exist_ok=True)
os.chdir(home)
sys.exit(main(["train", *sys.argv[2:]]))
