"""Names of the one model that is served. No MLX, no MPI."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shardmlx.server.openai_errors import ApiError, shown

UNLISTED = frozenset({"default", "default_model"})
"""Names that every server's model has; the second is mlx_lm.server's."""


@dataclass(frozen=True, slots=True)
class ModelNames:
    """The names of the model: /v1/models lists those of ``listed``, and answers have the first.
    ``others`` are understood too, and every name if it takes ``any_name``."""

    listed: tuple[str, ...]
    others: frozenset[str] = UNLISTED
    any_name: bool = False

    @property
    def first(self) -> str:
        """The name that answers have."""
        return self.listed[0]

    def check(self, name: str | None) -> None:
        """Raise ``ApiError`` unless the model has this name; None is as good as any."""
        if name is None or self.any_name or name in self.others or name in self.listed:
            return
        raise ApiError(
            404,
            f"the model {shown(name)} is not served here: ask for "
            f"{' or '.join(map(repr, self.listed))}",
            param="model",
            code="model_not_found",
        )


def names_of(model: str, given: Sequence[str], *, any_name: bool) -> ModelNames:
    """Return the names of the model of ``--model``: those that were ``given``, or its own. The
    value of ``--model`` is always understood, but a path is shown to nobody."""
    listed = tuple(dict.fromkeys(given)) or (own_name(model),)
    return ModelNames(listed, UNLISTED | {model}, any_name)


def own_name(model: str) -> str:
    """Return a repository's name, or that of a model's directory."""
    if not Path(model).is_dir():
        return model
    path = Path(model).absolute()
    # Hugging Face's cache: models--OWNER--NAME/snapshots/COMMIT.
    if path.parent.name == "snapshots" and path.parents[1].name.startswith("models--"):
        return path.parents[1].name.removeprefix("models--").replace("--", "/", 1)
    return path.resolve().name or model
