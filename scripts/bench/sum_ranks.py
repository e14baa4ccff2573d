"""``python -m scripts.bench.sum_ranks WAY NBYTES BUCKETS ROUNDS``: sums over hosts, a rank on each.

WAY is ``mpi``, for ours and MPI's Iallreduce in place by turns, under mpirun, and if there are two
ranks on each host, for ours in two levels; or ``ring``, MLX's,
or ``gloo``, torch's, each a process that is started for a rank. Rank 0 prints, as JSON, for each
way and round the seconds until all buckets are summed, on the slowest rank, and the most bytes that
a rank sent meanwhile, as its network interface counts them.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

SENT = Path("/sys/class/net/eth0/statistics/tx_bytes")


def measured(barrier: Callable[[], None], work: Callable[[], None]) -> tuple[float, int]:
    """Return the seconds that ``work`` takes, and the bytes that were sent from here."""
    barrier()
    sent, start = int(SENT.read_text()), time.perf_counter()
    work()
    return time.perf_counter() - start, int(SENT.read_text()) - sent


def over_mpi(size: int, buckets: int, rounds: int) -> Any:
    """Return what ours and MPI's took."""
    from shardmlx.distributed.run_ranks import connect

    with connect() as transport:
        results = by_both(transport, size, buckets, rounds)
        return results if transport.rank == 0 else None


def by_both(transport: Any, size: int, buckets: int, rounds: int) -> Any:
    """Return what both ways took, by turns."""
    import mlx.core as mx
    import numpy as np
    from mpi4py import MPI  # set up by connect

    from shardmlx.distributed.host_sums import HostSums, levels_of
    from shardmlx.distributed.messages import buffer_of, new_buffer
    from shardmlx.distributed.sums import Sums
    from shardmlx.engine.buffers import SUM_BUFFER_BYTES

    world = tuple(range(transport.size))
    sums = Sums(transport, new_buffer((SUM_BUFFER_BYTES // 4,), mx.float32))
    arrays = [new_buffer((size // 4,), mx.float32) for _ in range(buckets)]

    def ours() -> None:
        for exchange in [sums.all_reduce(array, world) for array in arrays]:
            sums.wait(exchange, lambda: "summing")

    def theirs() -> None:
        flat = [np.frombuffer(buffer_of(array), np.float32) for array in arrays]
        requests = [
            MPI.COMM_WORLD.Iallreduce(MPI.IN_PLACE, [each, MPI.FLOAT], MPI.SUM) for each in flat
        ]
        MPI.Request.Waitall(requests)

    ways = {"ours": ours, "Iallreduce": theirs}
    levels = levels_of(transport.rank, world, transport.hosts)
    if levels is not None:
        by_host = HostSums(sums, transport.rank, levels)

        def in_levels() -> None:
            for exchange in [by_host.all_reduce(array) for array in arrays]:
                sums.wait(exchange, lambda: "summing")

        ways["ours by host"] = in_levels
    results: dict[str, list[Any]] = {way: [] for way in ways}
    for turn in range(rounds + 1):
        for way, work in ways.items():
            if turn == 0:  # it opens the connections
                wanted, arrays = arrays, [new_buffer((1 << 16,), mx.float32)]
                work()
                arrays = wanted
                continue
            everyone = transport.all_gather(measured(transport.barrier, work))
            results[way].append([max(s for s, _ in everyone), max(b for _, b in everyone)])
    return results


def over_ring(size: int, buckets: int, rounds: int) -> Any:
    """Return what MLX's ring took."""
    import mlx.core as mx

    group = mx.distributed.init(strict=True, backend="ring")
    stream = mx.cpu

    def barrier() -> None:
        mx.eval(mx.distributed.all_sum(mx.ones(1), stream=stream))

    arrays = [mx.ones(size // 4) for _ in range(buckets)]
    mx.eval(arrays)

    def work() -> None:
        mx.eval([mx.distributed.all_sum(each, stream=stream) for each in arrays])

    barrier()
    results = []
    for _ in range(rounds):
        mine = mx.array([list(map(float, measured(barrier, work)))])
        everyone = mx.distributed.all_gather(mine, stream=stream).max(axis=0)
        results.append(everyone.tolist())
    return {"MLX's ring": results} if group.rank() == 0 else None


def over_gloo(size: int, buckets: int, rounds: int) -> Any:
    """Return what torch's gloo took."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method="env://")
    arrays = [torch.ones(size // 4) for _ in range(buckets)]

    def work() -> None:
        for pending in [dist.all_reduce(each, async_op=True) for each in arrays]:
            pending.wait()

    dist.all_reduce(torch.ones(1 << 16))
    results = []
    for _ in range(rounds):
        mine = torch.tensor(measured(dist.barrier, work), dtype=torch.float64)
        dist.all_reduce(mine, op=dist.ReduceOp.MAX)
        results.append(mine.tolist())
    rank = dist.get_rank()
    dist.destroy_process_group()
    return {"gloo": results} if rank == 0 else None


WAYS = {"mpi": over_mpi, "ring": over_ring, "gloo": over_gloo}


def main() -> None:
    way, *numbers = sys.argv[1:]
    results = WAYS[way](*map(int, numbers))
    if results is not None:
        print(json.dumps(results), flush=True)


if __name__ == "__main__":
    main()
