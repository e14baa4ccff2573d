"""The part of one rank in a run that generates: it builds the model, and loads its layers of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import mlx.core as mx

from shardmlx.common.reporter import Reporter
from shardmlx.config.inference import HEAD, InferenceConfig
from shardmlx.distributed.crew import takes_long
from shardmlx.distributed.transport import Transport
from shardmlx.inference.draft_model import ModelDrafter
from shardmlx.inference.grammars import Grammars, has_llguidance
from shardmlx.inference.kv_caches import check_limited, check_quantised
from shardmlx.inference.prefix_files import PrefixFiles, content_of
from shardmlx.inference.prompts import PromptEncoder
from shardmlx.inference.run import InferenceRun
from shardmlx.inference.sampler import random_state
from shardmlx.loading.build import build_draft_head, build_to_generate
from shardmlx.loading.rank_setup import ModelWorker
from shardmlx.models.runtime.divided_layers import take_share
from shardmlx.models.runtime.draft_head import DraftHead
from shardmlx.models.runtime.slice import Slice
from shardmlx.planning.generation import check_gives_back
from shardmlx.planning.job import Job


class InferenceWorker(ModelWorker):
    """The part of one rank in a run that generates."""

    def __init__(self, transport: Transport, reporter: Reporter) -> None:
        super().__init__(transport, reporter)
        self._head: DraftHead | None = None
        self._run: InferenceRun | None = None

    @property
    def run(self) -> InferenceRun:
        """The run, once ``build`` was called; with its weights once ``load`` was."""
        if self._run is None:
            raise RuntimeError("the model is not built yet")
        return self._run

    def build_head(self, draft: str, dtype: str | None) -> int:
        """Build the model's own head, with which the run drafts; return its bytes. Raises
        ``UserError``."""
        check_gives_back(self.opened.shape, draft)
        self._head = build_draft_head(self.opened.path, dtype)
        return self._head.nbytes

    def build(self, config: InferenceConfig, job: Job) -> None:
        """Build the whole model, lazily, and cut this rank's layers out. Raises ``UserError``."""
        opened = self.opened
        rank = self.transport.rank
        model = build_to_generate(
            opened.path, dtype=config.dtype, adapter_path=opened.adapters, seed=config.seed
        )
        (ends,) = job.layers(rank)
        part = Slice(model, *ends)
        if job.mesh.tp > 1:
            share = job.mesh.share(rank)
            take_share(part, opened.shape, job.shares, share, self.all_sum)
        if (limit := job.generated.setup.max_kv_size) is not None:
            check_limited(part, limit, opened.shape.model_type)
        if config.cache_quantisation is not None:
            check_quantised(part, config.cache_quantisation, opened.shape.model_type)
        self._run = InferenceRun(
            config=config,
            transport=self.transport,
            reporter=self.reporter,
            job=job,
            shape=opened.shape,
            part=part,
            encoder=None,
            random_state=random_state(),
            head=self._head if part.is_last else None,
        )

    @takes_long
    def load(self) -> None:
        """Read the weights of this rank's layers."""
        self.run.part.load()
        self.close_files()
        if self.run.head is not None:
            self.run.head.beside(self.run.part)
        mx.reset_peak_memory()

    def lead_with(self, encoder: PromptEncoder, drafter: ModelDrafter | None) -> InferenceRun:
        """Return rank 0's run, which alone has these."""
        self._run = replace(self.run, encoder=encoder, draft_model=drafter)
        return self._run

    def takes_grammars(self) -> bool:
        """Return whether this rank has llguidance, or needs none: it reads no requests, and does
        not sample."""
        reads_or_samples = self.transport.rank == 0 or self.run.part.is_last
        return has_llguidance() or not reads_or_samples

    def keep_to(self, grammars: Grammars) -> None:
        """Let answers keep to grammars."""
        self._run = replace(self.run, grammars=grammars)

    @takes_long
    def content(self) -> dict[str, str]:
        """Return what tells this rank's part of the model from others."""
        return content_of(self.run.part)

    @takes_long
    def open_prefix_files(self, directory: Path) -> None:
        """Keep prefixes in files from now on. Raises ``UserError``."""
        run = self.run
        layers = run.part.cache_names
        if run.head is not None:
            layers = (*layers, HEAD)
        self._run = replace(run, prefix_files=PrefixFiles.opened(directory, layers))

    @takes_long
    def prefix_faults(self, keys: Sequence[str]) -> dict[str, str]:
        """Return why kept sequences cannot be read on this rank, by their keys."""
        files = self.run.prefix_files
        assert files is not None, "they were opened"
        return files.faults(keys)

    def limit_silence(self, seconds: float) -> None:
        """Take a rank for lost after so many seconds without a sign of life."""
        self.transport.limit_silence(seconds)

    def follow(self) -> None:
        """Do what rank 0's first stage announces until it stops. On all other ranks."""
        self.run.later_stage().run()

    def memory(self) -> tuple[int, int]:
        """Return the bytes of this rank's weights, and those of its peak."""
        return self.run.part.nbytes, mx.get_peak_memory()
