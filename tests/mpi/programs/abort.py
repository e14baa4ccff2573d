"""Rank 1 gives up, by ``Transport.abort`` or with ``--die`` by a signal; the others wait for it."""

import shardmlx.common.prepared

import os
import signal
import sys

from shardmlx.distributed.mpi import MPITransport

transport = MPITransport(timeout=600.0)
transport.barrier()
if transport.rank == 1:
    print("rank 1 gives up", file=sys.stderr, flush=True)
    if "--die" in sys.argv:
        os.kill(os.getpid(), signal.SIGKILL)
    transport.abort(7)
transport.receive_object(1, "what never comes")
