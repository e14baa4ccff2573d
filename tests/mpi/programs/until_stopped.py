"""``until_stopped.py PHASE DIRECTORY TIMEOUT``: ranks that work until a signal comes, and then save
for a second, or for a minute if PHASE is ``saving``. They wait for each other for so many seconds.

Other phases are ``training``, ``loading`` and ``summing``; in the last two nobody asks for signals.
Every rank that is at work writes its process id to DIRECTORY/RANK, and every rank that saves makes
DIRECTORY/RANK.saves.
"""

import os
import signal
import sys
import time
from pathlib import Path

from shardmlx.common.environment import Blas
from shardmlx.distributed.messages import new_buffer
from shardmlx.distributed.run_ranks import run_ranks
from shardmlx.distributed.sums import Sums
from shardmlx.distributed.transport import Transport
from shardmlx.errors import Stopped

phase, directory, timeout = sys.argv[1:]


def work(options: None, transport: Transport, blas: Blas) -> None:
    import mlx.core as mx

    sums = Sums(transport, new_buffer((1 << 20,), mx.float32))
    numbers = new_buffer((10_000_000,), mx.float32)
    transport.barrier()
    for step in range(1, 6000):
        transport.activity.begin(f"step {step}")
        asked = transport.stop_requested() if phase in ("training", "saving") else None
        number = transport.broadcast(asked, what=f"step {step}")
        if number is not None:
            Path(directory, f"{transport.rank}.saves").touch()
            time.sleep(60.0 if phase == "saving" else 1.0)
            transport.barrier("saving")
            raise Stopped(number, f"stopped by {signal.Signals(number).name}: saved")
        if phase == "summing":
            for _ in range(10):
                exchange = sums.all_reduce(numbers, range(transport.size))
                sums.wait(exchange, lambda: f"{transport.name(transport.rank)}, summing")
        if step == 5:
            Path(directory, f"{transport.rank}.new").write_text(str(os.getpid()))
            Path(directory, f"{transport.rank}.new").rename(Path(directory, str(transport.rank)))
        time.sleep(0.1)


sys.exit(run_ranks(lambda rank: None, lambda options: float(timeout), lambda: work))
