"""The options of ``shardmlx evaluate``. No MLX, no MPI."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from shardmlx.config.command_line import CommandLine
from shardmlx.config.inference import MODEL, REFUSED, SAMPLING, InferenceConfig
from shardmlx.config.options import flag_of, in_group
from shardmlx.errors import UserError

_WHAT = "what is evaluated"

_REFUSED = {
    **REFUSED,
    "--output-dir": "name the file: --output results.json",
    "--max-length": "it is called --max-seq-length",
}
"""Options of mlx_lm.evaluate that are not here, and why."""


_what = in_group(_WHAT)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluateConfig(InferenceConfig):
    """The texts or tasks to evaluate a model on. Raises ``OptionError``, a ``UserError``."""

    data: str | None = _what(
        None,
        "directory with test.jsonl, .csv or .parquet, in any format that train reads: its "
        "perplexity is measured",
        metavar="DIR",
    )
    tasks: Sequence[str] = _what([], "tasks of lm-evaluation-harness, by name", metavar="TASK")
    include_path: str | None = _what(
        None, "directory with tasks of your own, as YAML", metavar="DIR"
    )
    num_shots: int | None = _what(
        None, "examples before each question", metavar="N", unset="as the task says", minimum=0
    )
    limit: int | None = _what(
        None, "questions of each task, or texts", metavar="N", unset="all", minimum=1
    )
    max_seq_length: int = _what(
        2048, "longest sequence; longer ones are cut", metavar="TOKENS", minimum=2
    )
    mask_prompt: bool = _what(False, "leave prompts out of the perplexity")
    output: str | None = _what(None, "JSON file for the results", metavar="FILE", unset="none")

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

LINE = CommandLine(
    options=EvaluateConfig,
    command="evaluate",
    description="Measure a model through pipeline stages: perplexity of texts, or tasks.",
    groups=(MODEL, _WHAT),
    shown={each.name for each in fields(EvaluateConfig)} - _OF_SAMPLING,
    refused=_REFUSED,
    check=EvaluateConfig.check_together,
)
