"""Places of world ranks among replicas, pipeline ranks and shares."""

import pytest

from shardmlx.errors import UserError
from shardmlx.pipeline.mesh import Mesh

TWELVE = Mesh(2, 3, 2)


def test_ranks_run_along_the_shares_then_the_pipeline_then_the_replicas() -> None:
    assert TWELVE.size == 12
    places = [(*TWELVE.coordinates(rank), TWELVE.share(rank)) for rank in range(12)]
    assert places == [
        (replica, pipeline_rank, share)
        for replica in range(2)
        for pipeline_rank in range(3)
        for share in range(2)
    ]
    for rank, (replica, pipeline_rank, share) in enumerate(places):
        assert TWELVE.rank(replica, pipeline_rank) + share == rank


def test_a_rank_knows_whom_it_shares_and_sums_with() -> None:
    assert TWELVE.sharing(9) == (8, 9)
    assert TWELVE.replicas_of(1) == (2, 8)
    assert TWELVE.replicas_of(1, 1) == (3, 9)
    assert TWELVE.pipeline_of(0) == (0, 1, 2, 3, 4, 5)
    assert TWELVE.pipeline_of(1) == (6, 7, 8, 9, 10, 11)
    assert Mesh(1, 2).sharing(1) == (1,)


def test_the_replicas_of_a_world_are_what_its_pipelines_leave() -> None:
    assert Mesh.for_world(6, 3) == Mesh(2, 3, 1)
    assert Mesh.for_world(3, 1) == Mesh(3, 1)
    for pp in (0, 4, 7):
        with pytest.raises(UserError, match=f"6 ranks cannot run pipelines of {pp} ranks"):
            Mesh.for_world(6, pp)


@pytest.mark.parametrize("sizes", [(0, 1, 1), (1, 0, 1), (1, 1, 0)])
def test_no_side_of_a_mesh_is_empty(sizes: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="is empty"):
        Mesh(*sizes)
