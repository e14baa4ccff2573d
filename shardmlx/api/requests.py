"""Requests of a training loop to the ranks, and their results: plain data. No MLX, no MPI.

A request is given to ``Service.submit``, from any thread, and its result comes as a future.
Requests of one model are carried out in the order in which they were submitted; samples wait for
nobody.
A request that is wrong ends in a ``UserError``, and concerns nobody else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from shardmlx.errors import UserError

LOSSES = ("cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "gspo")
"""Names of the losses, as in Tinker's API."""


class NoRoom(UserError):
    """Memory is planned for no other model, or no other snapshot: forget one first."""


@dataclass(frozen=True, slots=True)
class LoraOptions:
    """The LoRA of a new model: its rank, the ``seed`` of its first weights, and the parts of the
    base that it changes."""

    rank: int = 32
    seed: int = 0
    attention: bool = True
    mlp: bool = True
    unembed: bool = True


@dataclass(frozen=True, slots=True)
class CreateModel:
    """Make a model that trains: a new LoRA on the base, whose result is the model's name, or with
    ``state`` the LoRA of a saved state. Its future raises ``NoRoom`` if the plan has no memory for
    another one."""

    name: str
    lora: LoraOptions | None = None
    state: str | None = None
    with_optimizer: bool = False


@dataclass(frozen=True, slots=True)
class UnloadModel:
    """Forget a model. Its saved states stay."""

    model: str


@dataclass(frozen=True, slots=True, eq=False)
class LossRow:
    """A row of training: ``tokens`` (T,) int32 enter the model. The ``inputs`` of its loss have
    Tinker's names: ``target_tokens`` (T,) or (T, K) int64, ``weights`` of the same shape float32,
    and (T,) float32 ``advantages``, ``logprobs``, ``clip_low_threshold``, ``clip_high_threshold``,
    ``sequence_ratio_mask``."""

    tokens: np.ndarray
    inputs: Mapping[str, np.ndarray]


@dataclass(frozen=True, slots=True, eq=False)
class ForwardBackward:
    """Compute the loss of rows, summed over their tokens, and add its gradients to the model's; or
    with ``forward_only`` the loss alone. ``settings`` are the loss's own, such as its clip
    thresholds. The result is a ``LossResult``."""

    model: str
    rows: Sequence[LossRow]
    loss: str = "cross_entropy"
    settings: Mapping[str, float] = field(default_factory=dict)
    forward_only: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class LossResult:
    """The result of ``ForwardBackward``: of each row the log-probabilities of its targets, float32
    of their shape, and ``metrics`` such as ``loss:sum``."""

    logprobs: Sequence[np.ndarray]
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class OptimStep:
    """Update a model by AdamW with the gradients so far, and forget these. ``grad_clip_norm`` 0
    does not clip. The result is a mapping of metrics."""

    model: str
    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


@dataclass(frozen=True, slots=True)
class SaveState:
    """Save a model as ``state``, a relative path, with its optimizer's state. The result is a
    ``SavedState``. It is there for good once the result has come."""

    model: str
    state: str
    overwrite: bool = False
    for_sampler: bool = False
    """True if the weights alone are saved."""
    note: Mapping[str, Any] = field(default_factory=dict)
    """The client's own words on it, as JSON."""


@dataclass(frozen=True, slots=True)
class SavedState:
    """A saved state: its name, its LoRA, its bytes, the time of saving (seconds since the epoch),
    and what the client wanted kept with it."""

    state: str
    lora: LoraOptions
    nbytes: int
    saved_at: float
    has_optimizer: bool
    note: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LoadState:
    """Put a saved state into a model, with its optimizer's state or without."""

    model: str
    state: str
    with_optimizer: bool = False


@dataclass(frozen=True, slots=True)
class DeleteState:
    """Delete a saved state."""

    state: str


@dataclass(frozen=True, slots=True)
class TakeSnapshot:
    """Copy the LoRA of a model as ``snapshot``, in memory, for samples; or that of a saved
    ``state``, if there is no model: the one that was ``saved_at`` this time, or the one that there
    is. Its future raises ``NoRoom`` if the plan has no memory for another one."""

    snapshot: str
    model: str | None = None
    state: str | None = None
    saved_at: float | None = None


@dataclass(frozen=True, slots=True)
class DropSnapshot:
    """Forget a snapshot once no sample needs it any more."""

    snapshot: str


@dataclass(frozen=True, slots=True, eq=False)
class SamplePrompt:
    """Generate ``count`` answers to a prompt by a ``snapshot``, or by the base if it is None.

    An answer ends with ``max_tokens``, with the token that completes one of the ``stop_strings``,
    or with one of the ``stop_ids``; these are None for the tokenizer's ends. The answer holds that
    token too: renderers of Tinker's cookbook look for it. ``top_k`` 0 and ``top_p`` 1 leave nothing
    out. Log-probabilities are the model's own, at temperature 1. The result is a ``SampleResult``.
    """

    tokens: Sequence[int]
    snapshot: str | None = None
    count: int = 1
    max_tokens: int = 256
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop_strings: Sequence[str] = ()
    stop_ids: Sequence[int] | None = None
    top_logprobs: int = 0
    """The number of likeliest tokens wanted beside each that is sampled."""
    prompt_logprobs: bool = False
    top_prompt_logprobs: int = 0
    last_prompt_tokens: int | None = None
    """The number of last tokens of the prompt whose log-probabilities are wanted; None for all."""
    other_tokens: np.ndarray | None = None
    """Ids (T - 1, n) of other tokens, in the places of the prompt's T after its first, whose
    log-probabilities are wanted; -1 for none."""


@dataclass(frozen=True, slots=True, eq=False)
class TopTokens:
    """The likeliest tokens at n places: their ids (n, k) int32, and log-probabilities (n, k)
    float32."""

    ids: np.ndarray
    logprobs: np.ndarray


@dataclass(frozen=True, slots=True, eq=False)
class SampledAnswer:
    """An answer: its tokens (n,) int32 and their log-probabilities (n,) float32. It ended with
    ``stop``, or with its ``length``."""

    tokens: np.ndarray
    logprobs: np.ndarray
    reason: str
    top: TopTokens | None = None


@dataclass(frozen=True, slots=True, eq=False)
class SampleResult:
    """The answers to a prompt. ``prompt_logprobs`` (length of the prompt,) float32 are NaN where
    none was computed, as at the first token. ``cached`` counts the prompt's tokens that were taken
    from the prefix cache. ``other_logprobs`` are those of the ``other_tokens`` that were asked for,
    float32 of their shape, 0 where that is -1."""

    answers: Sequence[SampledAnswer]
    prompt_logprobs: np.ndarray | None = None
    top_prompt: TopTokens | None = None
    cached: int = 0
    other_logprobs: np.ndarray | None = None


class LoopEnded(RuntimeError):
    """The ranks have ended, or a rank is lost: the message names it. Saved states stay."""


Request = (
    CreateModel
    | UnloadModel
    | ForwardBackward
    | OptimStep
    | SaveState
    | LoadState
    | DeleteState
    | TakeSnapshot
    | DropSnapshot
    | SamplePrompt
)


class Service(Protocol):
    """The service that carries out requests. Its methods may be called on any thread."""

    def submit(self, request: Request) -> Future[Any]:
        """Take in a request. Its future raises ``UserError`` if the request is wrong, and
        ``LoopEnded`` if the ranks end first. A future that is cancelled ends a sample."""

    def states(self) -> Sequence[SavedState]:
        """Return all saved states, the oldest first."""

    def export(self, state: str) -> bytes:
        """Return a tar archive of a saved state's adapter, as mlx_lm and PEFT load it. Raises
        ``UserError``."""
