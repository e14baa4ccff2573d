"""The options of ``shardmlx hub``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from shardmlx.config import common_options as common
from shardmlx.config.command_line import CommandLine
from shardmlx.config.options import (
    REQUIRED,
    Options,
    in_group,
    option,
    refuse,
    same_as,
    section,
    split_names,
)
from shardmlx.config.serve import ServeConfig
from shardmlx.islands.aggregate import AGGREGATES, MEAN, Privacy
from shardmlx.islands.outer import ROUNDS
from shardmlx.islands.protocol import FEDAVG, TRAINING, Terms, check_secure_sums

_SERVER = "server"
_rounds, _server = map(in_group, (ROUNDS, _SERVER))


@dataclass(frozen=True, kw_only=True)
class HubOptions(Options):
    """The directory, terms, rules and address of a hub. Raises ``OptionError``, a ``UserError``."""

    terms: Terms = section(Terms)
    privacy: Privacy = section(Privacy)
    path: str = option(
        REQUIRED, "directory of the run, which a restart goes on with", metavar="DIR"
    )
    islands: str | None = option(
        None, "islands to make tokens for, with commas between", metavar="NAME,NAME"
    )
    write: str | None = option(
        None, "directory to write the outer weights to, as adapters, and end", metavar="DIR"
    )
    aggregate: str = _rounds(MEAN, "how one difference is made of all", choices=tuple(AGGREGATES))
    deadline: float = _rounds(
        600.0,
        "time after its first report when a round closes without the others",
        metavar="SECONDS",
        above=0,
    )
    max_norm_ratio: float | None = _rounds(
        None,
        "norm, in norms of the others' differences, from which one is refused",
        metavar="RATIO",
        above=1,
    )
    rounds: int | None = _rounds(None, "rounds after which the run ends", minimum=1)
    tokens: int | None = _rounds(None, "tokens of all islands after which it ends", minimum=1)
    hours: float | None = _rounds(None, "hours after which it ends", metavar="HOURS", above=0)
    host: str = same_as(ServeConfig, "host")
    port: int = common.port(8750, group=_SERVER)
    certificate: str | None = _server(
        None, "PEM file of a certificate and its key, for HTTPS", metavar="FILE"
    )

    @classmethod
    def settled(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Return flat values with what follows from others."""
        return Terms.settled(values)

    def __post_init__(self) -> None:
        super().__post_init__()
        terms = self.terms
        private = terms.mode == FEDAVG and terms.fragments == 1 and self.aggregate == MEAN
        refuse(
            "clip",
            f"is set with mode {terms.mode} and {terms.fragments} fragments",
            f"it is for mode {FEDAVG}, one fragment and the mean",
            when=self.privacy.clip and not private,
        )

        for name, value, usual in (
            ("aggregate", self.aggregate, MEAN),
            ("max_norm_ratio", self.max_norm_ratio, None),
            ("clip", self.privacy.clip, None),
        ):
            refuse(
                name,
                f"is {value} with secure_sums",
                "leave one out: the hub sees no single difference",
                when=terms.secure_sums and value != usual,
            )
        if terms.secure_sums:
            check_secure_sums("secure_sums")

    @property
    def names(self) -> list[str]:
        """The names of ``islands``."""
        return split_names(self.islands)


LINE = CommandLine(
    options=HubOptions,
    command="hub",
    description="Exchange weights among islands: jobs that train alone for some steps.",
    groups=(TRAINING, ROUNDS, _SERVER),
    shown=(
        *("path", "islands", "write", "mode", "inner_steps", "encoding", "deadline"),
        *("rounds", "hours", "host", "port", "certificate"),
    ),
)
