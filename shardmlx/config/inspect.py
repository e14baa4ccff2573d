"""The options of ``shardmlx inspect``. No MLX, no MPI."""

from __future__ import annotations

from dataclasses import dataclass

from shardmlx.config.command_line import CommandLine
from shardmlx.config.common_options import (
    hostfile_option,
    model_argument,
    revision_option,
    stage_map_option,
)
from shardmlx.config.options import OptionError, check_options, option

DEFAULT_PARTITIONER = "balanced"

_SPLIT = "split"
_OUTPUT = "output"


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectOptions:
    """The model to look at, how it is to be divided, and what is to be shown of it.

    Raises ``OptionError``, a ``UserError``.
    """

    model: str = model_argument()
    revision: str | None = revision_option()

    pipeline_stages: int | None = option(
        None,
        "stages to divide into, one a rank",
        unset="as many as the hostfile has slots",
        minimum=1,
        group=_SPLIT,
    )
    partitioner: str | None = option(
        None,
        "how --pipeline-stages divides",
        metavar="NAME",
        unset=DEFAULT_PARTITIONER,
        group=_SPLIT,
    )
    stage_map: str | None = stage_map_option(_SPLIT)
    hostfile: str | None = hostfile_option(_SPLIT)
    rank: int | None = option(
        None, "show tensors, files and byte ranges that this rank needs", group=_SPLIT
    )
    context: int | None = option(
        None,
        "count the memory of generating, too: tokens of a sequence, prompt included",
        metavar="TOKENS",
        group=_SPLIT,
    )
    sequences: int = option(1, "sequences at once, with --context", group=_SPLIT)

    all_layers: bool = option(False, "show a line for every layer", group=_OUTPUT)
    json: bool = option(False, "print all of it as JSON", group=_OUTPUT)
    verify: bool = option(
        False,
        "look for what is wrong with the files; status 1 if something is",
        group=_OUTPUT,
    )

    def __post_init__(self) -> None:
        check_options(self)
        if self.verify:
            return
        if self.stage_map is not None and self.partitioner is not None:
            raise OptionError(
                "partitioner", "divides anew, but --stage-map is given", "leave one out"
            )
        for name in ("rank", "partitioner", "context"):
            if getattr(self, name) is not None and not self.divides:
                raise OptionError(
                    name, "needs a split", "give --pipeline-stages, --stage-map or --hostfile"
                )

    @property
    def divides(self) -> bool:
        """True if the model is to be divided into stages."""
        given = (self.pipeline_stages, self.stage_map, self.hostfile)
        return any(each is not None for each in given)


LINE = CommandLine(
    options=InspectOptions,
    command="inspect",
    description="Show what a model consists of, from the headers of its files alone.",
)
