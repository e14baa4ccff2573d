"""``shared_texts.py T MODEL...``: generate the texts of models on stages of T ranks each.

Rank 0 prints a JSON object: of each model the texts, how many tokens were taken from the prefix
cache, and how many drafts were accepted.
"""

import shardmlx.common.prepared

import json
import sys
import traceback
from itertools import pairwise

from shardmlx.common.reporter import Reporter
from shardmlx.distributed.mlx_group import join_group
from shardmlx.distributed.mpi import MPITransport
from shardmlx.inference.drafts import BackOff, Drafting, LookupDrafter
from shardmlx.inference.kv_caches import KVCaches
from shardmlx.inference.later_stage import LaterStage
from shardmlx.inference.pipeline import FirstStage
from shardmlx.inference.prefix_cache import PrefixCache
from shardmlx.inference.route import TokenRoute
from shardmlx.inference.sampler import BatchSampler
from shardmlx.inference.scheduler import Scheduler
from shardmlx.inference.stage import StageWorker
from shardmlx.modelfiles.parts import read_shape
from shardmlx.models.runtime.divided_layers import take_share
from shardmlx.models.runtime.slice import Slice
from shardmlx.pipeline.mesh import Mesh
from shardmlx.planning.memory.generation import cuttable
from testbed.tiny_models import build
from tests.helpers.generation import CHUNK
from tests.helpers.shared_texts import config_of, shares_of, texts_in_turn


class Always(BackOff):
    """Drafts pay."""

    def allows(self, kind: int) -> bool:
        return True


def generate(name: str) -> tuple[list[list[int]], int, int] | None:
    """Return the model's texts on rank 0, with what was cached, and the drafts accepted."""
    config = config_of(name)
    shape, stage = read_shape(config), mesh.coordinates(transport.rank)[1]
    bounds = [*pairwise(shape.num_layers * i // mesh.pp for i in range(mesh.pp + 1))]
    part = Slice(build(config).eval(), *bounds[stage])
    take_share(part, shape, shares_of(name, mesh.tp), mesh.share(transport.rank), all_sum)
    caches = KVCaches(part.new_caches)
    worker = StageWorker(transport, part, caches, BatchSampler(7), route=TokenRoute.of(mesh))
    if transport.rank:
        LaterStage(worker).run()
        return None
    most = cuttable(shape)
    drafting = Drafting(LookupDrafter(), 4, fixed=True, cuttable=most, back_off=Always())
    groups = mesh.pp if shape.takes_batches else 2
    scheduler = Scheduler(groups, 2, CHUNK, None, 4096)
    first_stage = FirstStage(worker, scheduler, PrefixCache(most, shortest=4), drafting)
    texts, cached = texts_in_turn(first_stage)
    first_stage.stop()
    return texts, cached, first_stage.drafted.accepted


transport = MPITransport(timeout=60.0)
try:
    across = int(sys.argv[1])
    mesh = Mesh(1, transport.size // across, across)
    all_sum = join_group(transport, mesh.sharing(transport.rank), Reporter(quiet=True))
    found = {name: generate(name) for name in sys.argv[2:]}
    if transport.rank == 0:
        print(json.dumps(found))
except BaseException:
    traceback.print_exc()
    transport.abort(1)
transport.close()
