"""One rank's part in a run that generates: it builds the model, and loads its layers of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.core as mx

from shardmlx.common.reporter import Reporter
from shardmlx.config.inference import InferenceConfig
from shardmlx.costmodel.memory_limits import MemoryLimits
from shardmlx.distributed.mlx_group import join_group
from shardmlx.distributed.transport import Transport
from shardmlx.inference.kv_caches import check_quantised
from shardmlx.inference.plan import InferencePlan, check_gives_back
from shardmlx.inference.run import InferenceRun
from shardmlx.inference.sampler import random_state
from shardmlx.loading.build import build_draft_head, build_to_generate
from shardmlx.loading.rank_setup import ModelWorker
from shardmlx.models.divided_layers import take_share
from shardmlx.models.draft_head import DraftHead
from shardmlx.models.slice import Slice


class InferenceWorker(ModelWorker):
    """The part of one rank in a run that generates as ``config`` says, which is rank 0's."""

    def __init__(self, transport: Transport, reporter: Reporter, config: InferenceConfig) -> None:
        super().__init__(transport, reporter)
        self._config = config
        self._head: DraftHead | None = None
        self._all_sum: Callable[[mx.array], mx.array] | None = None
        self._run: InferenceRun | None = None

    @property
    def run(self) -> InferenceRun:
        """The run, once ``build`` was called; with its weights once ``load`` was."""
        if self._run is None:
            raise RuntimeError("the model is not built yet")
        return self._run

    def build_head(self) -> int:
        """Build the model's own head, which drafts; return its bytes. Raises ``UserError``."""
        check_gives_back(self.opened.shape, self._config.draft)
        self._head = build_draft_head(self.opened.path, self._config.dtype)
        return self._head.nbytes

    def join_group(self, members: Sequence[Sequence[int]]) -> None:
        """Join the group of ranks that share layers, with the others: ``members[rank]``."""
        mine = members[self.transport.rank]
        self._all_sum = join_group(self.transport, mine, self.reporter)

    def build(self, plan: InferencePlan, limits: tuple[MemoryLimits, ...]) -> None:
        """Build the whole model, lazily, and cut this rank's layers out. Raises ``UserError``."""
        config, opened, rank = self._config, self.opened, self.transport.rank
        model = build_to_generate(
            opened.path, dtype=config.dtype, adapter_path=opened.adapters, seed=config.seed
        )
        part = Slice(model, *plan.ranges[rank])
        if self._all_sum is not None:
            share = plan.mesh.share(rank)
            take_share(part, opened.shape, plan.shares, share, self._all_sum)
        if config.cache_quantisation is not None:
            check_quantised(part, config.cache_quantisation, opened.shape.model_type)
        self._run = InferenceRun(
            config=config,
            transport=self.transport,
            reporter=self.reporter,
            plan=plan,
            shape=opened.shape,
            part=part,
            encoder=None,
            random_state=random_state(),
            limits=limits,
            head=self._head if part.is_last else None,
        )

    def load(self) -> None:
        """Read the weights of this rank's layers."""
        self.run.part.load()
        self.close()
        if self.run.head is not None:
            self.run.head.beside(self.run.part)
        mx.reset_peak_memory()
