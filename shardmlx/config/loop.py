"""The options of a program's own training loop, by whichever command it runs."""

from __future__ import annotations

from dataclasses import dataclass

from shardmlx.config import common_options as common
from shardmlx.config.common_options import AUTO
from shardmlx.config.options import Options, in_group, section
from shardmlx.config.specs import RECOMPUTE, LayoutOptions, MachineOptions, ModelSource
from shardmlx.models.sizes.kv_cache import held
from shardmlx.pipeline.schedules import SCHEDULES

GROUP = "your own loop"

_loop = in_group(GROUP)


@dataclass(frozen=True, kw_only=True)
class LoopOptions:
    """The models that train at a time, and what their memory is planned for."""

    max_adapters: int = _loop(
        4, "models that train at a time: each a LoRA on the one base", metavar="MODELS", minimum=1
    )
    max_lora_rank: int = _loop(32, "largest rank of a LoRA", metavar="RANK", minimum=1)
    max_train_length: int = _loop(
        2048,
        "tokens of a row that is trained, at most",
        metavar="TOKENS",
        minimum=2,
        also=("--max-seq-length",),
    )
    state_dir: str | None = _loop(
        None, "directory on rank 0 for saved states", metavar="DIR", unset="none can be saved"
    )
    recompute: str | None = _loop(
        None,
        "what backward computes again: norms and activations, or all of a layer",
        choices=RECOMPUTE,
        unset="chosen: the least that fits",
    )
    schedule: str = _loop(
        AUTO,
        "order of forward and backward; auto: the fastest that fits, as predicted",
        choices=(AUTO, *(name for name in SCHEDULES if name != "gpipe")),
    )
    data_parallel: int | None = _loop(
        None, "replicas of the pipeline that train", unset="1", minimum=1
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopSpec:
    """A training loop as far as its plan depends on it: samples have KV caches of ``cache_tokens``
    together, ``sequences`` at a time."""

    source: ModelSource
    layout: LayoutOptions
    machines: MachineOptions
    loop: LoopOptions
    dtype: str | None
    cache_tokens: int
    sequences: int
    bytes_for_requests: int = 0
    """The bytes that rank 0 takes to read what clients send."""


@dataclass(frozen=True, kw_only=True)
class LoopConfig(Options):
    """The options of ``shardmlx.api.train_client``. Raises ``OptionError``, a ``UserError``."""

    source: ModelSource = section(ModelSource)
    loop: LoopOptions = section(LoopOptions)
    hostfile: str | None = common.hostfile(None)
    memory_limit: int | None = common.memory_limit()
    dtype: str | None = common.dtype()
    pipeline_stages: int | None = _loop(
        None, "ranks in one pipeline; the others become replicas", unset="all ranks", minimum=1
    )
    stage_map: str | None = common.stage_map()
    partitioner: str = common.partitioner()
    tensor_parallel: int = _loop(1, "ranks that compute each layer together", minimum=1)
    tensor_shares: str | None = common.tensor_shares()
    cache_tokens: int = _loop(
        16384, "tokens in the KV caches of all samples together", metavar="TOKENS", minimum=256
    )
    batch_size: int = _loop(8, "sequences that are sampled at a time", minimum=1)
    timeout: float = common.timeout()

    @property
    def spec(self) -> LoopSpec:
        """The part on which the plan depends."""
        return LoopSpec(
            source=self.source,
            layout=LayoutOptions(
                stage_map=self.stage_map,
                pipeline_stages=self.pipeline_stages,
                data_parallel=self.loop.data_parallel,
                tensor_parallel=self.tensor_parallel,
                tensor_shares=self.tensor_shares,
                partitioner=self.partitioner,
                schedule=self.loop.schedule,
            ),
            machines=MachineOptions(hostfile=self.hostfile, memory_limit=self.memory_limit),
            loop=self.loop,
            dtype=self.dtype,
            cache_tokens=held(self.cache_tokens),
            sequences=self.batch_size,
        )
