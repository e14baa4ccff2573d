"""Check requests before any rank hears of them. No MLX, no MPI."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardmlx.api.requests import (
    CreateModel,
    ForwardBackward,
    LoraOptions,
    LossRow,
    OptimStep,
    Request,
    SaveState,
)
from shardmlx.engine.token_losses import CLIPS, LOSSES, LossFacts
from shardmlx.errors import UserError

TARGETS = "target_tokens"

LEAST_EPS = 1e-37
"""The least number, about, that a float32 has with all its digits."""

LONGEST_NAME = 500
"""Characters of a state's name."""


@dataclass(frozen=True, slots=True)
class Checker:
    """The limits that requests are checked by: words of the ``vocabulary``, tokens of a row, and
    the largest rank of a LoRA. Its methods raise ``UserError``."""

    vocabulary: int
    most_length: int
    most_rank: int

    def check(self, request: Request) -> None:
        """Raise ``UserError`` if a request is wrong, whatever the models are."""
        match request:
            case ForwardBackward():
                self._check_loss(request)
            case OptimStep():
                _check_step(request)
            case CreateModel(lora=LoraOptions() as lora):
                self._check_lora(lora)
            case SaveState(state=state, note=note):
                check_state(state)
                _check_note(note)

    def _check_lora(self, lora: LoraOptions) -> None:
        if not (_is_whole(lora.rank) and 1 <= lora.rank <= self.most_rank):
            raise UserError(
                f"rank {lora.rank}: this server has room for ranks from 1 to {self.most_rank}",
                "ask for less, or start it with --max-lora-rank",
            )
        if not (_is_whole(lora.seed) and 0 <= lora.seed < 2**64):
            raise UserError(f"seed {lora.seed}", "give a whole number from 0 to 2^64 - 1")
        if not (lora.attention or lora.mlp or lora.unembed):
            raise UserError(
                "train_attn, train_mlp and train_unembed are all false", "let one of them be true"
            )

    def _check_loss(self, request: ForwardBackward) -> None:
        facts = LOSSES.get(request.loss)
        if facts is None:
            raise UserError(f"loss {request.loss!r} is not known", f"one of {', '.join(LOSSES)}")
        _check_settings(request.loss, facts, request.settings)
        if not request.rows:
            raise UserError("there are no rows", "give at least one")
        for number, row in enumerate(request.rows):
            try:
                self._check_row(row, request.loss, facts)
            except UserError as error:
                raise UserError(f"row {number}: {error.problem}", error.remedy) from None

    def _check_row(self, row: LossRow, loss: str, facts: LossFacts) -> None:
        count = len(row.tokens)
        if row.tokens.ndim != 1 or not count:
            raise UserError("it has no tokens", "give at least one")
        if count > self.most_length:
            raise UserError(
                f"it has {count} tokens, more than {self.most_length}",
                "cut it, or start the server with a larger --max-seq-length",
            )
        self._check_ids("tokens", row.tokens)
        known = {TARGETS, *facts.inputs, *facts.optional}
        if unknown := sorted(row.inputs.keys() - known):
            raise UserError(
                f"{loss} takes no {', '.join(unknown)}", f"it takes {', '.join(sorted(known))}"
            )
        if missing := sorted({TARGETS, *facts.inputs} - row.inputs.keys()):
            raise UserError(f"{loss} needs {', '.join(missing)}", "give them with each row")
        targets = row.inputs[TARGETS]
        if targets.ndim == 2 and not facts.several_targets:
            raise UserError(f"{loss} takes one target for each token", f"give {TARGETS} of (N,)")
        if targets.ndim not in (1, 2) or not targets.size:
            shape = tuple(targets.shape)
            raise UserError(f"{TARGETS} have the shape {shape}", "give (N,), or (N, K) with K > 0")
        self._check_ids(TARGETS, targets)
        if len(targets) != count:
            raise UserError(f"{len(targets)} {TARGETS} for {count} tokens", "give one for each")
        for name in sorted(row.inputs.keys() - {TARGETS}):
            _check_numbers(name, row.inputs[name], targets.shape)
        _check_clips(row.inputs)
        if loss == "gspo" and not row.inputs["sequence_ratio_mask"].any():
            raise UserError("sequence_ratio_mask marks no token", "mark the sampled ones with 1")

    def _check_ids(self, what: str, ids: np.ndarray) -> None:
        if not np.issubdtype(ids.dtype, np.integer):
            raise UserError(f"{what} are {ids.dtype}", "give whole numbers")
        wrong = ids[(ids < 0) | (ids >= self.vocabulary)]
        if wrong.size:
            raise UserError(
                f"{what} have {int(wrong.flat[0])}, which is not a word of the model's vocabulary",
                f"ids go from 0 to {self.vocabulary - 1}",
            )


def check_state(state: str) -> None:
    """Raise ``UserError`` unless a name of a saved state is a relative path."""
    parts = state.split("/")
    is_plain = state.isprintable() and len(state) <= LONGEST_NAME
    if not is_plain or any(part in ("", ".", "..") for part in parts):
        raise UserError(
            f"a state cannot be called {state[:100]!r}",
            f"give at most {LONGEST_NAME} characters: names, with / between them",
        )


def _check_settings(loss: str, facts: LossFacts, settings: Mapping[str, Any]) -> None:
    for name, value in settings.items():
        if name not in facts.settings:
            known = ", ".join(facts.settings) or "none"
            raise UserError(f"{loss} has no setting {name!r}", f"it has {known}")
        if not _is_number(value) or value < 0:
            raise UserError(f"{name} is {value!r}", "give a number from 0")
    all_settings = {**facts.settings, **settings}
    if CLIPS[0] in all_settings and all_settings[CLIPS[0]] > all_settings[CLIPS[1]]:
        low, high = (all_settings[name] for name in CLIPS)
        raise UserError(f"{CLIPS[0]} is {low}, and {CLIPS[1]} {high}", "give a lower one first")


def _check_numbers(name: str, values: np.ndarray, shape: tuple[int, ...]) -> None:
    if values.shape != shape:
        raise UserError(
            f"{name} have the shape {tuple(values.shape)}, and {TARGETS} {tuple(shape)}",
            "give one number for each target",
        )
    if not np.issubdtype(values.dtype, np.number) or np.iscomplexobj(values):
        raise UserError(f"{name} are {values.dtype}", "give numbers")
    with np.errstate(over="ignore"):
        is_finite = np.isfinite(values.astype(np.float32)).all()
    if not is_finite:
        raise UserError(f"{name} have a number that is not finite", "give finite numbers alone")


def _check_clips(inputs: Mapping[str, np.ndarray]) -> None:
    low, high = (inputs.get(name) for name in CLIPS)
    for name, values in zip(CLIPS, (low, high), strict=True):
        if values is not None and (values < 0).any():
            raise UserError(f"{name} has {values.min()}", "give numbers from 0")
    if low is not None and high is not None and (low > high).any():
        raise UserError(f"{CLIPS[0]} is above {CLIPS[1]} at a token", "give a lower one first")


def _check_note(note: Mapping[str, Any]) -> None:
    try:
        json.dumps(note, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise UserError(f"the note cannot be kept as JSON: {error}", "give plain values") from None


def _check_step(step: OptimStep) -> None:
    for name in ("learning_rate", "eps", "weight_decay", "grad_clip_norm"):
        value = getattr(step, name)
        if not _is_number(value) or value < 0:
            raise UserError(f"{name} is {value!r}", "give a number from 0")
    if step.eps < LEAST_EPS:
        raise UserError(
            f"eps is {step.eps}: a weight whose gradient is 0 would be 0 / 0",
            "give more than 1e-37, such as 1e-12",
        )
    for name in ("beta1", "beta2"):
        value = getattr(step, name)
        if not _is_number(value) or not 0 <= value < 1:
            raise UserError(f"{name} is {value!r}", "give a number from 0, below 1")


def _is_number(value: object) -> bool:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return False
    return math.isfinite(value)


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
