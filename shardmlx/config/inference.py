"""The options of generate, chat and evaluate: those of mlx-lm, and ours."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

from shardmlx.config import common_options as common
from shardmlx.config.checks import shares_of
from shardmlx.config.command_line import CommandLine
from shardmlx.config.common_options import AUTO
from shardmlx.config.data import DataOptions, WantedData
from shardmlx.config.options import Options, in_group, refuse, section
from shardmlx.config.specs import MachineOptions, ModelSource
from shardmlx.errors import UserError
from shardmlx.models.sizes.kv_cache import CacheQuantisation, held

MODEL = "model"
SAMPLING = "sampling"
PIPELINE = "pipeline"
_PROMPT = "prompt"
_CHAT = "chat"
_EVALUATED = "what is evaluated"

_IS_PIPELINE = "ranks are always a pipeline here: leave it out"

REFUSED: Mapping[str, str] = MappingProxyType(
    {
        "--pipeline": _IS_PIPELINE,
        "--use-default-chat-template": "transformers has no default any more: give the model a "
        "chat_template.jinja",
    }
)
"""Options of mlx_lm's commands that no command has here, and why."""

NO_DRAFT, LOOKUP, HEAD = "none", "lookup", "mtp"

MOST_DRAFTS = 16
"""Tokens that are guessed at a time at most, where what was right chooses how many."""

PIPELINED_CHUNK = 128
"""Tokens: small enough that a prompt of some hundred of them occupies all stages, large enough
that a matrix product is worth its weights. On a CPU one stage takes it too, since scores of a chunk
stay in its cache."""

WHOLE_CHUNK = 2048
"""mlx-lm's own, for a single stage on a GPU, whose fused kernel holds no scores."""


def _count_or_auto(text: str) -> int | None:
    if text == AUTO:
        return None
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"give a whole number, or {AUTO}") from None


_model = in_group(MODEL)
_sampling = in_group(SAMPLING)
_share = partial(_sampling, metavar="P", minimum=0, maximum=1)
most_tokens = partial(_sampling, metavar="TOKENS", minimum=1, short="-m")
_pipeline = in_group(PIPELINE)
_prompt = in_group(_PROMPT)
_chat = in_group(_CHAT)
_evaluated = in_group(_EVALUATED)


@dataclass(frozen=True, kw_only=True)
class InferenceConfig(Options):
    """The options of all commands that generate text. Raises ``OptionError``, a ``UserError``."""

    source: ModelSource = section(
        ModelSource, model=common.model("mlx-community/Llama-3.2-3B-Instruct-4bit")
    )
    adapter_path: str | None = _model(
        None, "directory of trained adapters, mlx-lm's or PEFT's", metavar="DIR"
    )
    trust_remote_code: bool = _model(False, "run code that comes with the tokenizer")
    extra_eos_token: Sequence[str] = _model(
        [], "further tokens that end an answer", metavar="TOKEN", parse=str.split
    )
    chat_template_config: str | None = _model(
        None,
        "arguments of the chat template, as a JSON object",
        metavar="JSON",
        also=("--chat-template-args",),
    )
    config: str | None = common.config(group=MODEL)

    max_tokens: int = most_tokens(100, "tokens to generate at most")
    temp: float = _sampling(0.0, "temperature; 0 takes the likeliest token", metavar="X", minimum=0)
    top_p: float = _share(1.0, "sample from the likeliest tokens of this probability together")
    min_p: float = _share(0.0, "leave out tokens less likely than this times the likeliest")
    top_k: int = _sampling(0, "sample from so many tokens; 0 for all", metavar="TOKENS", minimum=0)
    min_tokens_to_keep: int = _sampling(1, "tokens --min-p leaves", metavar="TOKENS", minimum=1)
    xtc_probability: float = _share(0.0, "probability with which XTC leaves out likely tokens")
    xtc_threshold: float = _share(0.1, "probability from which tokens are likely", maximum=0.5)
    seed: int | None = _sampling(
        None, "seed of sampling", unset="another one each time", minimum=0, maximum=2**64 - 1
    )

    hostfile: str | None = common.hostfile(None, group=PIPELINE)
    partitioner: str = common.partitioner(group=PIPELINE)
    stage_map: str | None = common.stage_map(group=PIPELINE)
    tensor_parallel: int = _pipeline(
        1, "ranks that compute each layer together, for a token sooner", metavar="RANKS", minimum=1
    )
    tensor_shares: str | None = common.tensor_shares(group=PIPELINE)
    expert_parallel: bool = common.expert_parallel(group=PIPELINE)
    batch_size: int = _pipeline(8, "sequences under way at a time, in all groups", minimum=1)
    prefill_step_size: int | None = _pipeline(
        None,
        "tokens of a prompt computed at a time",
        metavar="TOKENS",
        unset=f"{PIPELINED_CHUNK}; {WHOLE_CHUNK} on one rank with a GPU",
        minimum=1,
    )
    max_kv_size: int | None = _pipeline(
        None, "tokens of a sequence in its KV cache", metavar="TOKENS", unset="all", minimum=8
    )
    kv_bits: int | None = _pipeline(
        None, "bits of the quantised KV cache", choices=(2, 3, 4, 5, 6, 8), unset="not quantised"
    )
    kv_group_size: int = _pipeline(64, "KV elements that share a scale", choices=(32, 64, 128))
    quantized_kv_start: int = _pipeline(
        5000, "tokens from which on a KV cache is quantised", metavar="TOKENS", minimum=0
    )
    draft: str = _pipeline(
        NO_DRAFT,
        "verify guessed tokens of a text in one step: those that followed its last tokens before "
        "(lookup), those of the model's own head (mtp), or of a small model with the same "
        "tokenizer, whole on rank 0",
        metavar="MODEL",
        also=("--draft-model",),
    )
    num_draft_tokens: int | None = _pipeline(
        None,
        "tokens guessed at a time; auto: more while all are right",
        metavar="TOKENS",
        unset=AUTO,
        minimum=1,
        maximum=64,
        parse=_count_or_auto,
    )
    memory_limit: int | None = common.memory_limit(group=PIPELINE)
    dtype: str | None = common.dtype(group=PIPELINE)
    timeout: float = common.timeout(group=PIPELINE)

    @classmethod
    def settled(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Return flat values; one end with spaces between, as mlx_lm took it, counts as several."""
        return {**values, "extra_eos_token": " ".join(values["extra_eos_token"]).split()}

    def __post_init__(self) -> None:
        super().__post_init__()
        both = self.kv_bits is not None and self.max_kv_size is not None
        complaint = f"is {self.kv_bits}, and caches limited by --max-kv-size are not quantised"
        refuse("kv_bits", complaint, "give one of them", when=both)
        both = self.draft == HEAD and self.tensor_parallel > 1
        complaint = f"is {HEAD}, and --tensor-parallel {self.tensor_parallel} divides no head"
        refuse("draft", complaint, f"give {LOOKUP}, or a model", when=both)
        shares_of(self.tensor_shares, self.tensor_parallel)
        try:
            is_object = isinstance(self.template_arguments, dict)
        except ValueError:
            is_object = False
        complaint = f"is {self.chat_template_config!r}"
        remedy = 'give a JSON object, like {"enable_thinking": false}'
        refuse("chat_template_config", complaint, remedy, when=not is_object)

    @property
    def machines(self) -> MachineOptions:
        """The files and the limit that describe the machines."""
        return MachineOptions(hostfile=self.hostfile, memory_limit=self.memory_limit)

    @property
    def cache_quantisation(self) -> CacheQuantisation | None:
        """The way in which KV caches are quantised, if they are."""
        if self.kv_bits is None:
            return None
        return CacheQuantisation(self.kv_bits, self.kv_group_size, self.quantized_kv_start)

    @property
    def draft_model(self) -> str | None:
        """The model that drafts, if one does."""
        return None if self.draft in (NO_DRAFT, LOOKUP, HEAD) else self.draft

    @property
    def most_drafts(self) -> int:
        """The tokens that are guessed at a time at most."""
        return 0 if self.draft == NO_DRAFT else self.num_draft_tokens or MOST_DRAFTS

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


SHOWN = ("model", "adapter_path", "config", "max_tokens", "temp", "hostfile", "draft")
"""The options that ``--help`` of each command lists beside its own."""

DEFAULT_PROMPT = "hello"

_AS_WITHOUT = "layers compute as mlx_lm does without it: leave it out"
_REFUSED_GENERATE = {
    **REFUSED,
    "--image": "models here read text alone",
    "--prompt-cache-file": "KV caches live as long as the command: chat and serve keep prefixes",
    "--quantize-activations": _AS_WITHOUT,
    "-qa": _AS_WITHOUT,
}
"""Options of mlx_lm.generate that are not here, and why."""


@dataclass(frozen=True, kw_only=True)
class GenerateConfig(InferenceConfig):
    """The text to generate, and how. Raises ``OptionError``, a ``UserError``."""

    prompt: str | None = _prompt(
        None, "prompt; - reads it from stdin", metavar="TEXT", unset=DEFAULT_PROMPT, short="-p"
    )
    system_prompt: str | None = _prompt(None, "system prompt of the chat template", metavar="TEXT")
    prompts: str | None = _prompt(
        None,
        'file with a JSON object a line: "prompt" or "messages", perhaps "max_tokens"; '
        "- reads stdin",
        metavar="FILE",
    )
    output: str | None = _prompt(
        None, "file for the answers to --prompts, a JSON line each", metavar="FILE", unset="stdout"
    )
    prefill_response: str | None = _prompt(None, "text that begins the answer", metavar="TEXT")
    ignore_chat_template: bool = _prompt(False, "use the prompt as it is")
    verbose: bool = _prompt(True, "print more than the answer", takes_value=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        both = f"and --prompts {self.prompts}"
        alone = f"is {self.output}"
        refuse("prompt", both, "give one of them", when=None not in (self.prompt, self.prompts))
        refuse("output", alone, "it is for --prompts", when=self.output and self.prompts is None)


GENERATE = CommandLine(
    options=GenerateConfig,
    command="generate",
    description="Generate text through pipeline stages, one MPI rank each.",
    groups=(MODEL, _PROMPT),
    shown=(*SHOWN, "prompt", "system_prompt", "prompts", "output", "seed"),
    refused=_REFUSED_GENERATE,
)


@dataclass(frozen=True, kw_only=True)
class ChatConfig(InferenceConfig):
    """The model to talk with, and how. Raises ``OptionError``, a ``UserError``."""

    max_tokens: int = most_tokens(256, "tokens of an answer at most")
    system_prompt: str | None = _chat(None, "system prompt of the chat template", metavar="TEXT")
    cache_tokens: int = _chat(
        8192, "tokens of a conversation at most, and of its KV cache", metavar="TOKENS", minimum=256
    )
    verbose: bool = _chat(True, "print more than the answers", takes_value=True)

    @classmethod
    def settled(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Return flat values; a cache holds whole pieces."""
        return {**super().settled(values), "cache_tokens": held(values["cache_tokens"])}


CHAT = CommandLine(
    options=ChatConfig,
    command="chat",
    description="Talk with a model in the terminal, through pipeline stages, one MPI rank each.",
    groups=(MODEL, _CHAT),
    shown=(*SHOWN, "system_prompt", "cache_tokens", "kv_bits", "seed"),
    refused=REFUSED,
)


_REFUSED_EVALUATE = {
    **REFUSED,
    "--output-dir": "name the file: --output results.json",
    "--max-length": "it is called --max-seq-length",
}
"""Options of mlx_lm.evaluate that are not here, and why."""


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig(InferenceConfig):
    """The texts or tasks to evaluate a model on. Raises ``OptionError``, a ``UserError``."""

    data: str | None = _evaluated(
        None,
        "directory with test.jsonl, .csv or .parquet, as for train, to measure perplexity",
        metavar="DIR",
    )
    tasks: Sequence[str] = _evaluated([], "tasks of lm-evaluation-harness, by name", metavar="TASK")
    include_path: str | None = _evaluated(None, "directory of tasks in YAML", metavar="DIR")
    num_shots: int | None = _evaluated(
        None, "examples before each question", metavar="N", unset="as the task says", minimum=0
    )
    limit: int | None = _evaluated(
        None, "questions of each task, or texts", metavar="N", unset="all", minimum=1
    )
    max_seq_length: int = common.max_seq_length(group=_EVALUATED)
    mask_prompt: bool = _evaluated(False, "leave prompts out of the perplexity")
    output: str | None = _evaluated(
        None, "JSON file for the results alone", metavar="FILE", unset="none"
    )
    json: str | None = common.json(group=_EVALUATED)

    @property
    def wanted_data(self) -> WantedData:
        """The test set, whose rows are measured one by one."""
        data = DataOptions(
            test=True,
            data=str(self.data),
            mask_prompt=self.mask_prompt,
            trust_remote_code=self.trust_remote_code,
        )
        return WantedData(
            options=data, train=False, batch_size=1, max_seq_length=self.max_seq_length
        )

    def check_together(self) -> None:
        """Raise ``UserError`` unless the options go together; other ranks than 0 have none yet."""
        if (self.data is None) == (not self.tasks):
            found = "are both given" if self.tasks else "are both missing"
            raise UserError(f"--data and --tasks {found}", "give one of them")
        for flag, value in (("--include-path", self.include_path), ("--num-shots", self.num_shots)):
            if self.data is not None and value is not None:
                raise UserError(f"{flag} is for --tasks", "leave it out")


EVALUATE = CommandLine(
    options=EvaluateConfig,
    command="evaluate",
    description="Measure a model through pipeline stages: perplexity of texts, or tasks.",
    groups=(MODEL, _EVALUATED),
    shown=(
        *("model", "adapter_path", "config", "hostfile", "batch_size", "data", "tasks"),
        *("num_shots", "limit", "max_seq_length", "mask_prompt", "output", "json"),
    ),
    refused=_REFUSED_EVALUATE,
    check=EvaluateConfig.check_together,
)
