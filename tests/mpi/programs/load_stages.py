"""``load_stages.py OUTPUT ARGUMENTS``: one run of ``shardmlx.train`` that counts what it reads.

Every rank writes OUTPUT/rank-R.json: the layers of its stages; bytes that the process read until
all is loaded and until the run is over, 0 where the system does not count them; MLX's peak memory
while loading; and its memory limit.
"""

import shardmlx.common.prepared

import json
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import mlx.core as mx

from shardmlx.common.reporter import Reporter
from shardmlx.config.train import LINE
from shardmlx.distributed.crew import Crew, lead
from shardmlx.distributed.mpi import MPITransport
from shardmlx.training.command import prepare_training
from shardmlx.training.run_worker import RunWorker
from shardmlx.training.train import train_together
from shardmlx.training.trainer import Trainer
from shardmlx.training.worker import TrainWorker


def bytes_read() -> int:
    """By this process so far; 0 where the system does not count them."""
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
    except OSError:
        return 0
    return int(lines[0].removeprefix("rchar: "))


output, *arguments = sys.argv[1:]
config = LINE.load(arguments)
transport = MPITransport()
mx.reset_peak_memory()
read = [bytes_read()]
peaks: list[int] = []


class Counting(TrainWorker):
    """A rank that counts what it has read when it has loaded."""

    def load(self, *given: Any) -> Any:
        result = super().load(*given)
        read.append(bytes_read())
        peaks.append(mx.get_peak_memory())
        return result


def work(crew: Crew[TrainWorker]) -> None:
    prepare_training(config, crew, Reporter(quiet=True))
    train_together(crew, [Trainer(crew.part(RunWorker, "runs", 0))])


worker = Counting(transport, Reporter(quiet=True))
with closing(worker):
    lead(transport, worker, work)
job, peak = worker.runs[0].run, peaks[0]
read.append(bytes_read())
Path(output, f"rank-{transport.rank}.json").write_text(
    json.dumps(
        {
            "layers": [(stage.part.start, stage.part.stop) for stage in job.stages],
            "loading": read[1] - read[0],
            "running": read[2] - read[0],
            "peak": peak,
            "limit": mx.get_memory_limit(),
        }
    )
)
transport.close()
