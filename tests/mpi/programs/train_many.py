"""``train_many.py FILE.json``: ``shardmlx.train`` with each list of arguments in FILE.

One run after the other in one job, since a job takes longer to start than a tiny run to finish.
"""

import json
import sys
from pathlib import Path

from shardmlx.train import main

for arguments in json.loads(Path(sys.argv[1]).read_text()):
    status = main(arguments)
    if status != 0:
        sys.exit(status)
