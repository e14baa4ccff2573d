"""A partitioner of another package than shardmlx: an example, which a test installs."""

from shardmlx.errors import UserError
from shardmlx.partitioners import Partition, Problem, StageMap


def last_heavy(problem: Problem) -> StageMap:
    """Give each stage one layer, and the last one what is left. Raises ``UserError`` if its machine
    has too little memory."""
    ones = [1] * (problem.num_stages - 1)
    partition = Partition.from_sizes([*ones, problem.num_layers - len(ones)])
    last = problem.num_stages - 1
    rank = problem.placement[last]
    if problem.held(last, *partition.ranges[last]) > problem.capacity[rank]:
        raise UserError(f"{problem.name_of(rank)} cannot hold the last stage", "use more machines")
    return problem.stage_map(partition)
