"""Log-probabilities of given tokens: each batch goes through the stages of all ranks, the next one
right behind it, and the last rank sends back the scores of every token. Perplexity from them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from shardmlx.distributed.messages import Handle, new_buffer
from shardmlx.distributed.mlx_group import losses_named
from shardmlx.distributed.transport import Outbox, Transport
from shardmlx.engine.batches import Sample
from shardmlx.inference.stage import HIDDEN_TAG, UNSENT
from shardmlx.models.runtime.slice import Slice
from shardmlx.pipeline.mesh import Mesh

Sequences = Sequence[Sequence[int]]
"""Token ids of each sequence, two at least."""


@dataclass(frozen=True, slots=True)
class Scores:
    """Log-probabilities of tokens after a sequence's first, and which are likeliest: (T - 1,). In
    the places of these, the likeliest k tokens, ``top``, int32 (T - 1, k), and their
    log-probabilities ``top_logprobs``, the likeliest first."""

    logprobs: np.ndarray
    is_likeliest: np.ndarray
    top: np.ndarray
    top_logprobs: np.ndarray


class Scorer:
    """A rank's part in scoring, ``rows`` and ``chunk`` positions at a time: rank i has stage i, or
    a share of a stage in a ``mesh`` of such. Ranks beyond the mesh have no part in it."""

    def __init__(
        self, transport: Transport, part: Slice, rows: int, chunk: int, mesh: Mesh | None = None
    ) -> None:
        self._transport = transport
        self._part = part
        self._rows, self._chunk = rows, chunk
        self._mesh = mesh or Mesh(1, transport.size)
        self._sharing = self._mesh.sharing(transport.rank)
        across = len(self._sharing)
        self._giver, self._taker = transport.rank - across, transport.rank + across
        self._outbox = Outbox(transport)

    def score(self, sequences: Sequences, top: int = 0) -> list[Scores]:
        """Return, on rank 0, the sequences' scores, with the ``top`` likeliest tokens. All ranks
        score the same ones."""
        mine = self._scored(sequences, top) if self._transport.rank < self._mesh.size else {}
        everyone = self._transport.gather(mine, what="scores")
        last = self._mesh.size - 1
        return [] if everyone is None else [everyone[last][i] for i in range(len(sequences))]

    def _scored(self, sequences: Sequences, top: int) -> dict[int, Scores]:
        """Return the scores of sequences by number, on ranks of the last stage."""
        rank, name = self._transport.rank, self._transport.name
        # Sequences of a batch have about the same length.
        order = sorted(range(len(sequences)), key=lambda i: len(sequences[i]), reverse=True)
        batches = [order[at : at + self._rows] for at in range(0, len(order), self._rows)]
        shapes = [
            (len(batch), max(len(sequences[i]) for i in batch) - 1, self._part.hidden_size)
            for batch in batches
        ]
        mine: dict[int, Scores] = {}
        due = self._receive(shapes[0]) if shapes else None
        for number, batch in enumerate(batches):
            tokens = np.zeros((len(batch), shapes[number][1] + 1), np.int32)
            for row, i in enumerate(batch):
                tokens[row, : len(sequences[i])] = sequences[i]
            doing = f"scoring, batch {number}"
            what = f"{name(rank)}, {doing}"
            self._transport.activity.begin(doing)
            if due is None:
                x = mx.array(tokens[:, :-1])
            else:
                x, handle = due
                due = self._receive(shapes[number + 1]) if number + 1 < len(shapes) else None
                waiting = f"{what}, waiting for {name(self._giver)}"
                self._transport.wait(handle, partial(str, waiting))
            with losses_named(self._transport, self._sharing, partial(str, what)):
                hidden = mx.contiguous(self._part(x, attention_chunk=self._chunk))
                mx.eval(hidden)
            if self._part.is_last:
                scores = self._scores(hidden, tokens[:, 1:], top)
                for row, i in enumerate(batch):
                    count = len(sequences[i]) - 1
                    mine[i] = Scores(*(each[row, :count] for each in scores))
            else:
                self._outbox.send(hidden, self._taker, HIDDEN_TAG, doing)
                self._outbox.drain(UNSENT)
        self._outbox.drain(0)
        return mine

    def _receive(self, shape: tuple[int, ...]) -> tuple[mx.array, Handle] | None:
        if self._part.is_first:
            return None
        buffer = new_buffer(shape, self._part.dtype)
        return buffer, self._transport.receive(buffer, self._giver, HIDDEN_TAG)

    def _scores(self, hidden: mx.array, targets: np.ndarray, top: int) -> list[np.ndarray]:
        """Return the fields of ``Scores`` for ``targets``, each (rows, T) or (rows, T, top)."""
        found: list[list[np.ndarray]] = []
        wanted = mx.array(targets)
        positions = max(1, self._chunk // len(targets))  # logits are large
        for start in range(0, hidden.shape[1], positions):
            here = slice(start, start + positions)
            logits = self._part.logits(self._part.norm(hidden[:, here])).astype(mx.float32)
            logprobs = nn.log_softmax(logits)
            own = mx.take_along_axis(logprobs, wanted[:, here, None], axis=-1)[..., 0]
            is_own = mx.argmax(logits, axis=-1) == wanted[:, here]
            likeliest = mx.zeros((*own.shape, 0), mx.int32)
            if top:
                likeliest = mx.argsort(-logprobs, axis=-1)[..., :top].astype(mx.int32)
            of_likeliest = mx.take_along_axis(logprobs, likeliest, axis=-1)
            mx.eval(own, is_own, likeliest, of_likeliest)
            found.append([np.array(each) for each in (own, is_own, likeliest, of_likeliest)])
        return [np.concatenate(each, axis=1) for each in zip(*found, strict=True)]


@dataclass(frozen=True, slots=True)
class Perplexity:
    """The perplexity of texts of ``tokens``: e to ``loss``, their mean negative log-probability."""

    perplexity: float
    standard_error: float
    loss: float
    tokens: int


def perplexity_of(samples: Sequence[Sample], scores: Sequence[Scores]) -> Perplexity:
    """Return the perplexity of samples: all tokens after the first, from their start on."""
    pairs = zip(samples, scores, strict=True)
    counted = [score.logprobs[max(start, 1) - 1 :] for (_, start), score in pairs]
    losses = -np.concatenate(counted).astype(np.float64)
    loss = float(losses.mean())
    spread = float(losses.std(ddof=1)) if losses.size > 1 else 0.0
    error = math.exp(loss) * spread / math.sqrt(losses.size)
    return Perplexity(math.exp(loss), error, loss, losses.size)
