"""The options of ``shardmlx.generate``: those of ``mlx_lm.generate``, its defaults, and ours."""

from __future__ import annotations

from dataclasses import dataclass

from shardmlx.config.command_line import CommandLine
from shardmlx.config.inference import MODEL, REFUSED, InferenceConfig
from shardmlx.config.options import OptionError, in_group

_PROMPT = "prompt"

DEFAULT_PROMPT = "hello"
"""mlx_lm.generate's own."""

_REFUSED = {
    **REFUSED,
    "--image": "models here read text alone",
    "--prompt-cache-file": "KV caches live as long as the command: chat and serve keep prefixes",
    "--quantize-activations": "layers compute as mlx_lm does without it: leave it out",
    "-qa": "layers compute as mlx_lm does without it: leave it out",
}
"""Options of mlx_lm.generate that are not here, and why."""


_prompt = in_group(_PROMPT)


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


LINE = CommandLine(
    options=GenerateConfig,
    command="generate",
    description="Generate text through pipeline stages, one MPI rank each.",
    groups=(MODEL, _PROMPT),
    refused=_REFUSED,
)
