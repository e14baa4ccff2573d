"""The options that all commands share that generate text: those of mlx-lm, and ours."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from shardmlx.config import common_options as common
from shardmlx.config.options import OptionError, check_options, in_group
from shardmlx.models.kv_cache import CacheQuantisation

MODEL = "model"
SAMPLING = "sampling"
PIPELINE = "pipeline"

_NO_DRAFT = "there is no speculative decoding here: leave it out"
_IS_PIPELINE = "ranks are always a pipeline here: leave it out"

REFUSED: Mapping[str, str] = MappingProxyType(
    {
        "--draft-model": _NO_DRAFT,
        "--num-draft-tokens": _NO_DRAFT,
        "--pipeline": _IS_PIPELINE,
        "--use-default-chat-template": "transformers has no default any more: give the model a "
        "chat_template.jinja",
    }
)
"""Options of mlx_lm's commands that no command has here, and why."""

PIPELINED_CHUNK = 128
"""Tokens: small enough that a prompt of some hundred of them occupies all stages, large enough
that a matrix product is worth its weights. On a CPU one stage takes it too: there the
scores of a chunk are held, and take less time where they stay in the processor's cache."""

WHOLE_CHUNK = 2048
"""mlx-lm's own, for a single stage on a GPU, whose fused kernel holds no scores."""


_model = in_group(MODEL)
_sampling = in_group(SAMPLING)
_pipeline = in_group(PIPELINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class InferenceConfig:
    """The options of all commands that generate text, checked as far as neither model nor files are
    needed.

    Raises ``OptionError``, a ``UserError``.
    """

    model: str = common.model("mlx-community/Llama-3.2-3B-Instruct-4bit", group=MODEL)
    revision: str | None = common.revision(group=MODEL)
    adapter_path: str | None = _model(None, "directory of trained adapters", metavar="DIR")
    weights: str = common.weights(group=MODEL)
    weight_cache: str | None = common.weight_cache(group=MODEL)
    trust_remote_code: bool = _model(False, "run code that comes with the tokenizer")
    extra_eos_token: Sequence[str] = _model(
        [], "further tokens that end an answer", metavar="TOKEN", parse=str.split
    )
    chat_template_config: str | None = _model(
        None,
        "further arguments of the chat template, as a JSON object",
        metavar="JSON",
        also=("--chat-template-args",),
    )
    config: str | None = common.config(group=MODEL)

    max_tokens: int = _sampling(
        100, "tokens to generate at most", metavar="TOKENS", minimum=1, short="-m"
    )
    temp: float = _sampling(
        0.0, "sampling temperature; 0 takes the likeliest token", metavar="X", minimum=0
    )
    top_p: float = _sampling(
        1.0,
        "sample from the likeliest tokens that together have this probability",
        metavar="P",
        minimum=0,
        maximum=1,
    )
    min_p: float = _sampling(
        0.0,
        "leave out tokens less likely than this times the likeliest",
        metavar="P",
        minimum=0,
        maximum=1,
    )
    top_k: int = _sampling(0, "sample from so many tokens; 0 for all", metavar="TOKENS", minimum=0)
    min_tokens_to_keep: int = _sampling(
        1, "tokens that --min-p leaves at least", metavar="TOKENS", minimum=1
    )
    xtc_probability: float = _sampling(
        0.0,
        "probability with which XTC sampling leaves out the likeliest tokens",
        metavar="P",
        minimum=0,
        maximum=1,
    )
    xtc_threshold: float = _sampling(
        0.1,
        "probability above which XTC sampling may leave out a token",
        metavar="P",
        minimum=0,
        maximum=0.5,
    )
    seed: int | None = _sampling(
        None, "seed of sampling", unset="another one each time", minimum=0, maximum=2**64 - 1
    )

    hostfile: str | None = common.hostfile(None, group=PIPELINE)
    partitioner: str = common.partitioner(group=PIPELINE)
    stage_map: str | None = common.stage_map(group=PIPELINE)
    batch_size: int = _pipeline(
        8, "sequences under way at a time, over all groups together", minimum=1
    )
    prefill_step_size: int | None = _pipeline(
        None,
        "tokens of a prompt computed at a time, in chunked prefill",
        metavar="TOKENS",
        unset=f"{PIPELINED_CHUNK}; {WHOLE_CHUNK} on one rank with a GPU",
        minimum=1,
    )
    max_kv_size: int | None = _pipeline(
        None,
        "tokens of each sequence that its KV cache keeps",
        metavar="TOKENS",
        unset="all",
        minimum=8,
    )
    kv_bits: int | None = _pipeline(
        None,
        "bits of an element in the KV cache, quantised",
        choices=(2, 3, 4, 5, 6, 8),
        unset="not quantised",
    )
    kv_group_size: int = _pipeline(
        64, "elements in the KV cache that share a scale", choices=(32, 64, 128)
    )
    quantized_kv_start: int = _pipeline(
        5000,
        "tokens of a sequence from which on --kv-bits quantises its KV cache",
        metavar="TOKENS",
        minimum=0,
    )
    memory_limit: int | None = common.memory_limit(group=PIPELINE)
    dtype: str | None = common.dtype(group=PIPELINE)
    timeout: float = common.timeout(group=PIPELINE)

    def __post_init__(self) -> None:
        check_options(self)
        # One word with spaces between, as mlx_lm took it, counts as several.
        words = [word for each in self.extra_eos_token for word in each.split()]
        object.__setattr__(self, "extra_eos_token", words)
        if self.kv_bits is not None and self.max_kv_size is not None:
            raise OptionError(
                "kv_bits",
                f"is {self.kv_bits}, and caches limited by --max-kv-size are not quantised",
                "give one of them",
            )
        if self.chat_template_config is not None:
            try:
                arguments = json.loads(self.chat_template_config)
            except ValueError:
                arguments = None
            if not isinstance(arguments, dict):
                raise OptionError(
                    "chat_template_config",
                    f"is {self.chat_template_config!r}",
                    'give a JSON object, like {"enable_thinking": false}',
                )

    @property
    def cache_quantisation(self) -> CacheQuantisation | None:
        """The way in which KV caches are quantised, if they are."""
        if self.kv_bits is None:
            return None
        return CacheQuantisation(self.kv_bits, self.kv_group_size, self.quantized_kv_start)

    @property
    def bytes_for_requests(self) -> int:
        """The bytes that rank 0 takes to read what clients send."""
        return 0

    @property
    def template_arguments(self) -> dict[str, Any]:
        """The arguments of the chat template."""
        arguments: dict[str, Any] = json.loads(self.chat_template_config or "{}")
        return arguments

    def chunk(self, ranks: int, backend: str) -> int:
        """Tokens of a prompt that a stage computes at a time."""
        is_whole = ranks == 1 and backend != "cpu"
        return self.prefill_step_size or (WHOLE_CHUNK if is_whole else PIPELINED_CHUNK)
