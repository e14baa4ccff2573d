"""The options of a program's own training loop, by whichever command it runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from shardmlx.config import common_options as common
from shardmlx.config.common_options import AUTO, SIMPLEST
from shardmlx.config.inference import PIPELINED_CHUNK, InferenceConfig
from shardmlx.config.objective import ObjectiveOptions
from shardmlx.config.options import Options, in_group, section
from shardmlx.config.specs import (
    RECOMPUTE,
    BatchOptions,
    FineTune,
    LayoutOptions,
    ModelSource,
    RunSpec,
)
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
    """A training loop as far as its plan depends on it: the models that train, and the ``answers``
    that are sampled, whose KV caches have ``cache_tokens`` together. Where layers are divided so
    that no answers can be computed, the loop trains alone, unless it ``must_sample``."""

    answers: InferenceConfig
    loop: LoopOptions
    cache_tokens: int
    pipeline_stages: int | None = None
    must_sample: bool = True

    @property
    def source(self) -> ModelSource:
        """The base of all models."""
        return self.answers.source

    @property
    def lora_parameters(self) -> Mapping[str, float]:
        """The largest LoRA of a model, as mlx-lm has it; of all its linear layers."""
        return {"rank": self.loop.max_lora_rank, "scale": 1.0, "dropout": 0.0}

    def run(self, *, pack: bool, rows: int) -> RunSpec:
        """Return the run of one of its models, with steps of so many ``rows``. Training and samples
        share the ranks: a stage on each unless the schedule asks for more, and no replicas unless
        these are asked for."""
        loop = self.loop
        answers = self.answers
        replicas = loop.data_parallel
        if (replicas, self.pipeline_stages, answers.stage_map) == (None, None, None):
            replicas = 1
        return RunSpec(
            model=self.source.model,
            revision=self.source.revision,
            fine_tune=FineTune(
                train=True,
                num_layers=-1,
                lora_parameters=self.lora_parameters,
                dtype=answers.dtype,
                zero=0,
            ),
            batch=BatchOptions(
                batch_size=rows,
                max_seq_length=loop.max_train_length,
                recompute=loop.recompute,
                pack=pack,
            ),
            layout=LayoutOptions(
                stage_map=answers.stage_map,
                pipeline_stages=self.pipeline_stages,
                data_parallel=replicas,
                tensor_parallel=answers.tensor_parallel,
                tensor_shares=answers.tensor_shares,
                partitioner=answers.partitioner,
                schedule=SIMPLEST if loop.schedule == AUTO else loop.schedule,
            ),
            machines=answers.machines,
            loss=ObjectiveOptions(),
        )


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
        shared = {
            "hostfile": self.hostfile,
            "memory_limit": self.memory_limit,
            "dtype": self.dtype,
            "stage_map": self.stage_map,
            "partitioner": self.partitioner,
            "tensor_parallel": self.tensor_parallel,
            "tensor_shares": self.tensor_shares,
            "batch_size": self.batch_size,
            "prefill_step_size": PIPELINED_CHUNK,
        }
        return LoopSpec(
            answers=InferenceConfig.from_flat(**asdict(self.source), **shared),
            loop=self.loop,
            cache_tokens=held(self.cache_tokens),
            pipeline_stages=self.pipeline_stages,
            must_sample=False,
        )
