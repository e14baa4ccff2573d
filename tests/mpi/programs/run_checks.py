"""``run_checks.py MODULE DIRECTORY``: run the ``checks`` of a module on every rank of mpirun.

Every rank writes one JSON line a check to DIRECTORY/rank-R.jsonl: its name, and the traceback if
it failed. A failure ends the job, for the other ranks would wait for ever.
"""

from shardmlx.common.environment import prepare

prepare()

import importlib  # noqa: E402
import json  # noqa: E402
import sys  # noqa: E402
import traceback  # noqa: E402
from pathlib import Path  # noqa: E402

from shardmlx.distributed.mpi import MPITransport  # noqa: E402

module, directory = sys.argv[1:]
transport = MPITransport(timeout=20.0)
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
