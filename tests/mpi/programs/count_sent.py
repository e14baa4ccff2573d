"""``count_sent.py RUNS``: train several times on the same ranks, and count what each run sends.

RUNS is a JSON list of options of ``train``. The file ``sent-RANK`` gets, for each of them, the
bytes that this host's network card has sent meanwhile.
"""

import json
import os
import sys
from pathlib import Path

from shardmlx.main import main

COUNTER = Path("/sys/class/net/eth0/statistics/tx_bytes")

sent = []
for options in json.loads(sys.argv[1]):
    before = int(COUNTER.read_text())
    status = main(["train", *options])
    if status:
        sys.exit(status)
    sent.append(int(COUNTER.read_text()) - before)
Path(f"sent-{os.environ['OMPI_COMM_WORLD_RANK']}").write_text(json.dumps(sent))
