"""The options of generate, chat and evaluate: those of mlx-lm, and ours."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any

from shardmlx.config import common_options as common
from shardmlx.config.command_line import CommandLine
from shardmlx.config.options import OptionError, check_options, flag_of, in_group
from shardmlx.errors import UserError
from shardmlx.models.kv_cache import CacheQuantisation, held

MODEL = "model"
SAMPLING = "sampling"
PIPELINE = "pipeline"
_PROMPT = "prompt"
_CHAT = "chat"
_EVALUATED = "what is evaluated"

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
_prompt = in_group(_PROMPT)
_chat = in_group(_CHAT)
_evaluated = in_group(_EVALUATED)


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


DEFAULT_PROMPT = "hello"
"""mlx_lm.generate's own."""

_REFUSED_GENERATE = {
    **REFUSED,
    "--image": "models here read text alone",
    "--prompt-cache-file": "KV caches live as long as the command: chat and serve keep prefixes",
    "--quantize-activations": "layers compute as mlx_lm does without it: leave it out",
    "-qa": "layers compute as mlx_lm does without it: leave it out",
}
"""Options of mlx_lm.generate that are not here, and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateConfig(InferenceConfig):
    """The text to generate, and how. Raises ``OptionError``, a ``UserError``."""

    prompt: str | None = _prompt(
        None, "prompt; - reads it from stdin", metavar="TEXT", unset=DEFAULT_PROMPT, short="-p"
    )
    system_prompt: str | None = _prompt(None, "system prompt of the chat template", metavar="TEXT")
    prompts: str | None = _prompt(
        None,
        'file with a JSON object a line: "prompt" or "messages", perhaps "max_tokens"; it is '
        "answered in JSON lines in the same order",
        metavar="FILE",
    )
    output: str | None = _prompt(
        None, "file for the answers to --prompts", metavar="FILE", unset="stdout"
    )
    prefill_response: str | None = _prompt(
        None, "text with which the answer begins", metavar="TEXT"
    )
    ignore_chat_template: bool = _prompt(False, "use the prompt as it is")
    verbose: bool = _prompt(True, "print more than the answer", takes_value=True)

    def __post_init__(self) -> None:
        super(GenerateConfig, self).__post_init__()
        if self.prompt is not None and self.prompts is not None:
            raise OptionError("prompt", f"and --prompts {self.prompts}", "give one of them")
        if self.output is not None and self.prompts is None:
            raise OptionError("output", f"is {self.output}", "it is for the answers to --prompts")


GENERATE = CommandLine(
    options=GenerateConfig,
    command="generate",
    description="Generate text through pipeline stages, one MPI rank each.",
    groups=(MODEL, _PROMPT),
    refused=_REFUSED_GENERATE,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatConfig(InferenceConfig):
    """The model to talk with, and how. Raises ``OptionError``, a ``UserError``."""

    max_tokens: int = _sampling(
        256, "tokens of an answer at most", metavar="TOKENS", minimum=1, short="-m"
    )
    system_prompt: str | None = _chat(None, "system prompt of the chat template", metavar="TEXT")
    cache_tokens: int = _chat(
        8192, "tokens of a conversation at most, and of its KV cache", metavar="TOKENS", minimum=256
    )
    verbose: bool = _chat(True, "print more than the answers", takes_value=True)

    def __post_init__(self) -> None:
        super(ChatConfig, self).__post_init__()
        object.__setattr__(self, "cache_tokens", held(self.cache_tokens))


CHAT = CommandLine(
    options=ChatConfig,
    command="chat",
    description="Talk with a model in the terminal, through pipeline stages, one MPI rank each.",
    groups=(MODEL, _CHAT),
    refused=REFUSED,
)


_REFUSED_EVALUATE = {
    **REFUSED,
    "--output-dir": "name the file: --output results.json",
    "--max-length": "it is called --max-seq-length",
}
"""Options of mlx_lm.evaluate that are not here, and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluateConfig(InferenceConfig):
    """The texts or tasks to evaluate a model on. Raises ``OptionError``, a ``UserError``."""

    data: str | None = _evaluated(
        None,
        "directory with test.jsonl, .csv or .parquet, in any format that train reads: its "
        "perplexity is measured",
        metavar="DIR",
    )
    tasks: Sequence[str] = _evaluated([], "tasks of lm-evaluation-harness, by name", metavar="TASK")
    include_path: str | None = _evaluated(
        None, "directory with tasks of your own, as YAML", metavar="DIR"
    )
    num_shots: int | None = _evaluated(
        None, "examples before each question", metavar="N", unset="as the task says", minimum=0
    )
    limit: int | None = _evaluated(
        None, "questions of each task, or texts", metavar="N", unset="all", minimum=1
    )
    max_seq_length: int = _evaluated(
        2048, "longest sequence; longer ones are cut", metavar="TOKENS", minimum=2
    )
    mask_prompt: bool = _evaluated(False, "leave prompts out of the perplexity")
    output: str | None = _evaluated(None, "JSON file for the results", metavar="FILE", unset="none")

    def check_together(self) -> None:
        """Raise ``UserError`` unless the options go together; other ranks than 0 have none yet."""
        if (self.data is None) == (not self.tasks):
            found = "are both given" if self.tasks else "are both missing"
            raise UserError(f"--data and --tasks {found}", "give one of them")
        if self.data is not None:
            for name in ("include_path", "num_shots"):
                if getattr(self, name) is not None:
                    raise UserError(f"{flag_of(name)} is for --tasks", "leave it out")


_OF_SAMPLING = {
    each.name for each in fields(InferenceConfig) if each.metadata["option"].group == SAMPLING
}

EVALUATE = CommandLine(
    options=EvaluateConfig,
    command="evaluate",
    description="Measure a model through pipeline stages: perplexity of texts, or tasks.",
    groups=(MODEL, _EVALUATED),
    shown={each.name for each in fields(EvaluateConfig)} - _OF_SAMPLING,
    refused=_REFUSED_EVALUATE,
    check=EvaluateConfig.check_together,
)
