"""``share_orders.py FIRST ORDERS CELL...``: try so many orders of cells with tensor shares.

Rank 0 prints a JSON object: of each cell the seeds whose bits differ from those of ranks that hold
nothing back, with the rank and the names of what differs.
"""

import shardmlx.common.prepared

import json
import sys
import traceback

from shardmlx.common.reporter import Reporter
from shardmlx.distributed.mlx_group import join_group
from shardmlx.pipeline.mesh import Mesh
from tests.helpers.share_orders import ACROSS, CELLS, LateTransport

transport = LateTransport()
try:
    first, orders = map(int, sys.argv[1:3])
    mesh = Mesh(1, transport.size // ACROSS, ACROSS)
    all_sum = join_group(transport, mesh.sharing(transport.rank), Reporter(quiet=True))
    faults = {}
    for cell in (each for each in CELLS if str(each) in sys.argv[3:]):
        transport.draw(None)
        expected = cell.bits(transport, all_sum)
        others = []
        for seed in range(first, first + orders):
            transport.draw(seed)
            bits = cell.bits(transport, all_sum)
            if bits != expected:
                names = [name for name in expected if bits.get(name) != expected[name]]
                others.append(f"order {seed}, rank {transport.rank}: {', '.join(names)}")
        transport.draw(None)
        faults[str(cell)] = [each for of_rank in transport.all_gather(others) for each in of_rank]
    if transport.rank == 0:
        print(json.dumps(faults))
except BaseException:
    traceback.print_exc()
    transport.abort(1)
transport.close()
