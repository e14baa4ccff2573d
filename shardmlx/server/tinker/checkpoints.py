"""Saved states as Tinker's API shows them: checkpoints of training runs. No MLX, no MPI.

A state is called ``RUN/KIND/NAME``, and ``tinker://RUN/KIND/NAME`` is its path at clients.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from tinker import types

from shardmlx.api.requests import SavedState
from shardmlx.errors import UserError
from shardmlx.server.openai_errors import shown

SCHEME = "tinker://"

TRAINING = "weights"
SAMPLER = "sampler_weights"
EXTERNAL = "external_weights"

_TYPES: Mapping[str, types.CheckpointType] = {
    TRAINING: "training",
    SAMPLER: "sampler",
    EXTERNAL: "external",
}

_NAME = re.compile(r"[\w][\w .+=-]{0,99}", re.ASCII)


def state_of(path: str) -> str:
    """Return the name of the state at a path. Raises ``UserError``."""
    if not path.startswith(SCHEME):
        raise UserError(f"the path is {shown(path)}", f"a saved state's begins with {SCHEME}")
    return path.removeprefix(SCHEME)


def path_of(state: str) -> str:
    """Return the path at which clients find a state."""
    return f"{SCHEME}{state}"


def new_state(run: str, kind: str, name: str) -> str:
    """Return the name of a state that a run saves. Raises ``UserError``."""
    if not _NAME.fullmatch(name):
        problem = f"the name of a saved state is {shown(name)}"
        raise UserError(problem, "give letters, digits, and . _ - between them, without a slash")
    return f"{run}/{kind}/{name}"


def note_of(user_metadata: Mapping[str, Any] | None, of_run: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is kept with a state: the client's words on it, and on its run."""
    return {"user_metadata": dict(user_metadata or {}), "run": dict(of_run)}


def checkpoint_of(saved: SavedState) -> types.Checkpoint | None:
    """Return a state as Tinker lists it; None if no client of this API saved it."""
    parts = saved.state.split("/")
    if len(parts) != 3 or parts[1] not in _TYPES:
        return None
    return types.Checkpoint(
        checkpoint_id="/".join(parts[1:]),
        checkpoint_type=_TYPES[parts[1]],
        time=datetime.fromtimestamp(saved.saved_at, UTC),
        tinker_path=path_of(saved.state),
        size_bytes=saved.nbytes,
        user_metadata=texts_of(saved.note.get("user_metadata")),
    )


def texts_of(metadata: Any) -> dict[str, str]:
    """Return a client's words as Tinker shows them: texts alone."""
    found = metadata if isinstance(metadata, Mapping) else {}
    return {str(name): str(value) for name, value in found.items()}


def runs_of(states: Iterable[SavedState]) -> dict[str, list[SavedState]]:
    """Return the states of each run, the oldest first."""
    runs: dict[str, list[SavedState]] = {}
    for saved in states:
        if checkpoint_of(saved) is not None:
            runs.setdefault(saved.state.split("/")[0], []).append(saved)
    return runs


def training_run(
    run: str,
    states: Sequence[SavedState],
    *,
    base_model: str,
    rank: int,
    last_request: datetime | None,
    user_metadata: Mapping[str, Any] | None,
) -> types.TrainingRun:
    """Return a run as Tinker shows it; ``last_request`` is None if it trains no more."""
    last: dict[str, types.Checkpoint] = {}
    for each in map(checkpoint_of, states):
        if each is not None:
            last[each.checkpoint_type] = each
    seen = last_request or max(each.time for each in last.values())
    return types.TrainingRun(
        training_run_id=run,
        base_model=base_model,
        model_owner="shardmlx",
        is_lora=True,
        lora_rank=rank,
        last_request_time=seen,
        last_checkpoint=last.get("training"),
        last_sampler_checkpoint=last.get("sampler"),
        user_metadata=texts_of(user_metadata),
    )
