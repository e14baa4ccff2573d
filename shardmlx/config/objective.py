"""The objective of training, as options. No MLX, no MPI."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from types import MappingProxyType
from typing import Any

from shardmlx.config.options import OptionError, in_group, option, refuse
from shardmlx.errors import one_line

_objective = in_group("objective")

SFT = "sft"
"""The objective of ``mlx_lm.lora``: the likelihood of the next token."""


@dataclass(frozen=True, slots=True)
class ObjectiveFacts:
    """An objective of preferences: whether its rows are pairs of a chosen and a rejected answer,
    whether it compares with the model as the run starts, its usual beta, and its own settings."""

    is_paired: bool
    has_reference: bool
    beta: float
    settings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnObjective(ObjectiveFacts):
    """An objective of a user's module, named ``MODULE:NAME``.

    ``loss`` takes ``Answers`` of ``shardmlx.engine.objectives`` and ``ObjectiveOptions``, and
    returns an array: the loss of each pair, or of each row. ``reward`` returns one number for each
    answer: by default beta times what training has added to its log-probability, and times this
    log-probability where there is no reference. Each rank imports the module.
    """

    loss: Callable[[Any, ObjectiveOptions], Any]
    reward: Callable[[Any, ObjectiveOptions], Any] | None = None


OBJECTIVES: Mapping[str, ObjectiveFacts] = MappingProxyType(
    {
        "dpo": ObjectiveFacts(True, True, 0.1, ("loss_type", "label_smoothing")),
        "orpo": ObjectiveFacts(True, False, 0.1),
        "simpo": ObjectiveFacts(True, False, 2.0, ("label_smoothing", "simpo_gamma")),
        "cpo": ObjectiveFacts(True, False, 0.1, ("label_smoothing", "cpo_alpha")),
        "kto": ObjectiveFacts(False, True, 0.1, ("desirable_weight", "undesirable_weight")),
    }
)
"""The objectives of preferences; ``engine/objectives.py`` has their losses."""


MEANS = (
    *("chosen_reward", "rejected_reward", "margin", "accuracy"),
    *("chosen_logp", "rejected_logp"),
)
"""Means over answers that an objective of preferences reports; the accuracy is the share of pairs
whose chosen answer has the higher reward."""


def facts_of(objective: str) -> ObjectiveFacts | None:
    """Return the facts of an objective of preferences; None for sft. Raises ``OptionError``."""
    if objective == SFT or objective in OBJECTIVES:
        return OBJECTIVES.get(objective)
    known = f"choose from {', '.join((SFT, *OBJECTIVES))}, or give MODULE:NAME of your own"
    is_place = re.fullmatch(r"[\w.]+:[\w.]+", objective)
    refuse("objective", f"is {objective!r}", known, when=not is_place)
    try:
        found: Any = EntryPoint("objective", objective, "").load()
    except Exception as error:  # a user's module may raise anything at its import
        reason = f"{type(error).__name__}: {one_line(error)}"
        complaint = f"is {objective}, which cannot be imported: {reason}"
        remedy = "install the module on every machine, or name its directory in PYTHONPATH"
        raise OptionError("objective", complaint, remedy) from error
    if isinstance(found, OwnObjective):
        return found
    complaint = f"is {objective}, which is a {type(found).__name__}"
    raise OptionError("objective", complaint, "make it an OwnObjective")


def rows_together(objective: str) -> int:
    """Return how many sequences an objective compares: two of a pair."""
    facts = facts_of(objective)
    return 2 if facts is not None and facts.is_paired else 1


DPO_LOSSES = ("sigmoid", "hinge", "ipo", "robust")


@dataclass(frozen=True, kw_only=True)
class ObjectiveOptions:
    """The objective and its settings; their names are TRL's."""

    objective: str = _objective(
        SFT,
        "sft: answers as they are; of preferences: dpo, orpo, simpo, cpo in pairs, kto in rows",
        metavar="{" + ",".join((SFT, *OBJECTIVES, "MODULE:NAME")) + "}",
    )
    beta: float | None = _objective(
        None, "strength of a preference", flag=False, metavar="BETA", unset="0.1; simpo: 2", above=0
    )
    loss_type: str = option("sigmoid", "form of dpo", choices=DPO_LOSSES, flag=False)
    label_smoothing: float = option(
        0.0, "share of pairs that may be swapped", minimum=0, maximum=0.49, flag=False
    )
    simpo_gamma: float = option(0.5, "margin that simpo asks for", minimum=0, flag=False)
    cpo_alpha: float = option(
        1.0, "weight of the chosen answers' own loss in cpo", minimum=0, flag=False
    )
    desirable_weight: float = option(1.0, "weight of desirable rows in kto", above=0, flag=False)
    undesirable_weight: float = option(
        1.0, "weight of undesirable rows in kto", above=0, flag=False
    )

    @property
    def preferences(self) -> ObjectiveFacts | None:
        """The facts of an objective of preferences; None for sft."""
        return facts_of(self.objective)

    @property
    def together(self) -> int:
        """Rows that must be in one micro-batch."""
        return rows_together(self.objective)

    @property
    def strength(self) -> float:
        """The beta that is given, or the objective's usual one."""
        if self.beta is not None:
            return self.beta
        return 0.0 if self.preferences is None else self.preferences.beta

    def check_objective(self) -> None:
        """Raise ``OptionError`` for a setting that the objective does not read."""
        read = () if self.preferences is None else ("beta", *self.preferences.settings)
        for name in ("beta", *dict.fromkeys(s for f in OBJECTIVES.values() for s in f.settings)):
            given = getattr(self, name)
            usual = getattr(ObjectiveOptions, name)
            refuse(
                name,
                f"is {given} with objective {self.objective}, which does not read it",
                "leave it out",
                when=given != usual and name not in read,
            )
        refuse(
            "label_smoothing",
            f"is {self.label_smoothing} with loss_type {self.loss_type}",
            "leave one out",
            when=self.label_smoothing and self.loss_type in ("hinge", "ipo"),
        )
