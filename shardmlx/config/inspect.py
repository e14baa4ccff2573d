"""The options of ``shardmlx inspect``. No MLX, no MPI."""

from __future__ import annotations

from dataclasses import dataclass

from shardmlx.config import common_options as common
from shardmlx.config.command_line import CommandLine
from shardmlx.config.options import OptionError, check_options, in_group

DEFAULT_PARTITIONER = "balanced"

_SPLIT = "split"
_OUTPUT = "output"


_split = in_group(_SPLIT)
_output = in_group(_OUTPUT)


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectOptions:
    """The model to look at, how it is to be divided, and what is to be shown of it.

    Raises ``OptionError``, a ``UserError``.
    """

    model: str = common.model_argument()
    revision: str | None = common.revision()

    pipeline_stages: int | None = _split(
        None,
        "stages to divide into, one a rank",
        unset="as many as the hostfile has slots",
        minimum=1,
    )
    partitioner: str | None = _split(
        None,
        "how --pipeline-stages divides",
        metavar="NAME",
        unset=DEFAULT_PARTITIONER,
    )
    stage_map: str | None = common.stage_map(group=_SPLIT)
    hostfile: str | None = common.hostfile(None, group=_SPLIT)
    rank: int | None = _split(None, "show tensors, files and byte ranges that this rank needs")
    context: int | None = _split(
        None,
        "count the memory of generating, too: tokens of a sequence, prompt included",
        metavar="TOKENS",
        minimum=1,
    )
    sequences: int = _split(1, "sequences at once, with --context", minimum=1)

    all_layers: bool = _output(False, "show a line for every layer")
    json: bool = _output(False, "print all of it as JSON")
    verify: bool = _output(False, "look for what is wrong with the files; status 1 if something is")

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
