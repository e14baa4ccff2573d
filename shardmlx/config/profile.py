"""The options of ``shardmlx profile``: its own, and those of a training run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from shardmlx.config import common_options as common
from shardmlx.config.command_line import CommandLine
from shardmlx.config.options import Options, in_group, refuse, section
from shardmlx.config.train import PASSED_OVER, TrainConfig

MEASURED_PARTS = (8, 2, 1)
"""The parts of --max-seq-length that are measured: an eighth of its tokens, a half, and all."""

_MEASURED = "what is measured"
_measured = in_group(_MEASURED)

_SHOWN = (
    *("model", "revision", "rows", "lengths", "output", "timeout", "config"),
    *("fine_tune_type", "num_layers", "max_seq_length", "dtype", "optimizer"),
)
"""The options that ``--help`` lists: of a training run, those that change what is measured."""


@dataclass(frozen=True, kw_only=True)
class ProfileOptions(Options):
    """The measurements of a model that is trained so. Raises ``OptionError``, a ``UserError``."""

    run: TrainConfig = section(
        TrainConfig, model=common.model_argument(), timeout=common.timeout(group=_MEASURED)
    )
    rows: int = _measured(1, "sequences a micro-batch", minimum=1)
    lengths: str | None = _measured(
        None,
        "tokens a sequence, with commas between",
        metavar="TOKENS,TOKENS",
        unset="an eighth, a half and all of --max-seq-length",
    )
    output: str = _measured(
        "profile.json", "file for the measured times", metavar="FILE", short="-o"
    )

    @classmethod
    def settled(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Return flat values with what follows from others. Raises ``OptionError``."""
        return TrainConfig.settled(values)

    def __post_init__(self) -> None:
        super().__post_init__()
        too_short = min(self._lengths()) < 1
        remedy = "give numbers of tokens, like 128,512"
        refuse("lengths", f"is {self.lengths!r}", remedy, when=too_short)

    @property
    def timeout(self) -> float:
        """Seconds that a rank waits for another."""
        return self.run.timeout

    @property
    def shapes(self) -> tuple[tuple[int, int], ...]:
        """The micro-batches to measure: (rows, tokens a row) each."""
        return tuple((self.rows, length) for length in sorted(self._lengths()))

    def _lengths(self) -> set[int]:
        if self.lengths is None:
            return {max(1, self.run.batch.max_seq_length // each) for each in MEASURED_PARTS}
        try:
            return {int(word) for word in self.lengths.split(",")}
        except ValueError:
            return {0}


LINE = CommandLine(
    options=ProfileOptions,
    command="profile",
    description="Measure how long each part of a model takes on each machine, for the planner.",
    groups=(_MEASURED,),
    shown=_SHOWN,
    passed_over=PASSED_OVER,
    epilog="Takes every option of shardmlx train too: they say what is trained, and how.",
)
