"""``load_stages.py OUTPUT ARGUMENTS``: one run of ``shardmlx.train`` that counts what it reads.

Every rank writes OUTPUT/rank-R.json: the layers of its stages; bytes that the process read until
all is loaded and until the run is over, 0 where the system does not count them; MLX's peak memory
while loading; and its memory limit.
"""

import shardmlx.common.prepared

import json
import sys
from pathlib import Path

import mlx.core as mx

from shardmlx.config.train import LINE
from shardmlx.distributed.mpi import MPITransport
from shardmlx.training.trainer import Trainer
from tests.helpers.loaded_runs import loaded_run


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
job = loaded_run(config, transport)
peak = mx.get_peak_memory()
read.append(bytes_read())
Trainer(job).train()
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
