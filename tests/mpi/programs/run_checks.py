"""``run_checks.py MODULE DIRECTORY``: run the ``checks`` of a module on every rank of mpirun.

Every rank writes one JSON line a check to DIRECTORY/rank-R.jsonl: its name, and the traceback if
it failed. A failure ends the job, for the other ranks would wait for ever.
"""

import shardmlx.common.prepared

import importlib
import json
import sys
import traceback
from pathlib import Path

from shardmlx.distributed.mpi import MPITransport

module, directory = sys.argv[1:]
transport = MPITransport(timeout=60.0)
with Path(directory, f"rank-{transport.rank}.jsonl").open("w") as results:
    checks = importlib.import_module(module).checks(transport.size)
    for name, check in checks.items():
        error = None
        try:
            check(transport)
            transport.barrier(name)
        except BaseException:
            error = traceback.format_exc()
        results.write(json.dumps([name, error]) + "\n")
        results.flush()
        if error is not None:
            transport.abort(1)
transport.close()
