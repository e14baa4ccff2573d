"""Let the answers of all ranks keep to grammars."""

from __future__ import annotations

from typing import Protocol

from shardmlx.distributed.crew import Crew
from shardmlx.inference.grammars import Grammars, grammars_of
from shardmlx.inference.prompts import PromptEncoder


class AnswersWorker(Protocol):
    """The worker of a rank that takes part in answers."""

    def takes_grammars(self) -> bool:
        """Return whether this rank has what grammars need of it."""

    def keep_to(self, grammars: Grammars) -> None:
        """Let answers keep to grammars."""


def share_grammars(
    crew: Crew[AnswersWorker], encoder: PromptEncoder, vocabulary: int
) -> Grammars | None:
    """Let answers keep to grammars over a ``vocabulary`` of so many tokens; return these. None if a
    rank that needs llguidance lacks it, or the tokenizer is of a kind that it cannot read."""
    if not all(crew.all(AnswersWorker.takes_grammars)):
        return None
    grammars = grammars_of(encoder, vocabulary)
    if grammars is not None:
        crew.all(AnswersWorker.keep_to, grammars)
    return grammars
