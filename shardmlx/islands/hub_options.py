"""The options of ``shardmlx hub``."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from shardmlx.config import common_options as common
from shardmlx.config.command_line import CommandLine
from shardmlx.config.options import (
    REQUIRED,
    check_options,
    in_group,
    option,
    refuse,
    same_as,
    split_names,
)
from shardmlx.config.serve import ServeConfig
from shardmlx.islands.aggregate import AGGREGATES, MEAN, Privacy
from shardmlx.islands.outer import AVERAGE, NESTEROV, RATES, SGD, OuterOptimizer
from shardmlx.islands.protocol import DILOCO, FEDAVG, MODES, PARAMETER_SERVER, Terms

_TRAINING, _ROUNDS, _SERVER = "what islands do", "outer steps", "server"
_training, _rounds, _server = map(in_group, (_TRAINING, _ROUNDS, _SERVER))


@dataclass(frozen=True, kw_only=True)
class HubOptions:
    """The directory, terms, rules and address of a hub. Raises ``OptionError``, a ``UserError``."""

    path: str = option(
        REQUIRED, "directory of the run, which a restart goes on with", metavar="DIR"
    )
    islands: str | None = option(
        None, "islands to make tokens for, with commas between", metavar="NAME,NAME"
    )
    write: str | None = option(
        None, "directory to write the outer weights to, as adapters, and end", metavar="DIR"
    )
    mode: str = _training(DILOCO, "when differences count, and by what weights", choices=MODES)
    inner_steps: int = _training(
        100, "steps between two reports of an island; 1 for a parameter server", minimum=1
    )
    overlap: int = _training(0, "steps that it trains on while it waits for a round", minimum=0)
    fragments: int = _training(
        1, "parts of the model, which are sent one after the other", minimum=1
    )
    encoding: str = _training(
        "float32",
        "form of differences: float32, bfloat16, int8, top-k:SHARE, low-rank:RANK",
        metavar="FORM",
    )
    outer_optimizer: str | None = _rounds(
        None,
        "what makes new weights of differences",
        unset=f"{NESTEROV}; {AVERAGE} for {FEDAVG}, {SGD} for {PARAMETER_SERVER}",
        choices=tuple(RATES),
    )
    outer_learning_rate: float | None = _rounds(
        None,
        "its learning rate",
        metavar="RATE",
        above=0,
        unset=", ".join(f"{rate:g} for {name}" for name, rate in RATES.items()),
    )
    outer_momentum: float = _rounds(0.9, f"momentum of {NESTEROV}", metavar="SHARE", minimum=0)
    aggregate: str = _rounds(MEAN, "how one difference is made of all", choices=tuple(AGGREGATES))
    deadline: float = _rounds(
        600.0,
        "time after its first report when a round closes without the others",
        metavar="SECONDS",
        above=0,
    )
    missing_after: float = _rounds(
        60.0,
        "time without a sign of an island when rounds no longer wait for it",
        metavar="SECONDS",
        above=0,
    )
    max_norm_ratio: float | None = _rounds(
        None,
        "norm, in norms of the others' differences, from which one is refused",
        metavar="RATIO",
        above=1,
    )
    clip: float | None = _rounds(
        None, f"norm to which {FEDAVG} shortens a difference", metavar="NORM", above=0
    )
    noise: float = _rounds(
        0.0, "Gaussian noise, in --clip, on the sum of differences", metavar="FACTOR", minimum=0
    )
    rounds: int | None = _rounds(None, "rounds after which the run ends", minimum=1)
    tokens: int | None = _rounds(None, "tokens of all islands after which it ends", minimum=1)
    hours: float | None = _rounds(None, "hours after which it ends", metavar="HOURS", above=0)
    host: str = same_as(ServeConfig, "host")
    port: int = common.port(8750, group=_SERVER)
    certificate: str | None = _server(
        None, "PEM file of a certificate and its key, for HTTPS", metavar="FILE"
    )

    def __post_init__(self) -> None:
        check_options(self)
        if self.mode == PARAMETER_SERVER:
            object.__setattr__(self, "inner_steps", 1)
        _ = self.terms, self.privacy  # each checks itself
        only = f"is set with mode {self.mode} and {self.fragments} fragments"
        private = self.mode == FEDAVG and self.fragments == 1 and self.aggregate == MEAN
        refuse(
            "clip",
            only,
            f"it is for mode {FEDAVG}, one fragment and the mean",
            when=self.clip and not private,
        )

    @cached_property
    def terms(self) -> Terms:
        """Terms that islands learn as they join."""
        return Terms(
            mode=self.mode,
            inner_steps=self.inner_steps,
            overlap=self.overlap,
            fragments=self.fragments,
            encoding=self.encoding,
            elastic=self.optimizer.elastic,
        )

    @cached_property
    def optimizer(self) -> OuterOptimizer:
        """The outer optimizer."""
        usual = {FEDAVG: AVERAGE, PARAMETER_SERVER: SGD}.get(self.mode, NESTEROV)
        return OuterOptimizer(
            name=self.outer_optimizer or usual,
            rate=self.outer_learning_rate,
            momentum=self.outer_momentum,
        )

    @cached_property
    def privacy(self) -> Privacy:
        """Clipping and noise."""
        return Privacy(clip=self.clip, noise=self.noise)

    @property
    def names(self) -> list[str]:
        """The names of ``islands``."""
        return split_names(self.islands)


LINE = CommandLine(
    options=HubOptions,
    command="hub",
    description="Exchange weights among islands: jobs that train alone for some steps.",
    groups=(_TRAINING, _ROUNDS, _SERVER),
)
