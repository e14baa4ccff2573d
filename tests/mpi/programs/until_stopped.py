"""``until_stopped.py {training,loading} DIRECTORY``: ranks that work until a signal comes, and then
save for a second.

While ``loading`` nobody asks for signals. Every rank that is at work writes its process id to
DIRECTORY/RANK.
"""

import os
import signal
import sys
import time
from pathlib import Path

from shardmlx.common.environment import Blas
from shardmlx.distributed.run_ranks import run_ranks
from shardmlx.distributed.transport import Transport
from shardmlx.errors import Stopped

phase, directory = sys.argv[1:]


def work(options: None, transport: Transport, blas: Blas) -> None:
    transport.barrier()
    for step in range(1, 600):
        transport.activity.begin(f"step {step}")
        asked = transport.stop_requested() if phase == "training" else None
        number = transport.broadcast(asked, what=f"step {step}")
        if number is not None:
            time.sleep(1.0)
            transport.barrier("saving")
            raise Stopped(number, f"stopped by {signal.Signals(number).name}: saved")
        if step == 5:
            Path(directory, f"{transport.rank}.new").write_text(str(os.getpid()))
            Path(directory, f"{transport.rank}.new").rename(Path(directory, str(transport.rank)))
        time.sleep(0.1)


sys.exit(run_ranks(lambda rank: None, lambda options: 3.0, lambda: work))
