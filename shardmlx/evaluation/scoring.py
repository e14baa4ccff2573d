"""Log-probabilities of given tokens: each batch goes through the stages of all ranks, the next one
right behind it, and the last rank sends back the scores of every token. Perplexity from them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from shardmlx.distributed.messages import Handle, new_buffer
from shardmlx.distributed.mlx_group import losses_named
from shardmlx.distributed.transport import Outbox, Transport
from shardmlx.engine.batches import Sample
from shardmlx.inference.route import TokenRoute
from shardmlx.inference.stage import HIDDEN_TAG, UNSENT
from shardmlx.models.runtime.slice import Slice
from shardmlx.pipeline.mesh import Mesh

Sequences = Sequence[Sequence[int]]
"""Token ids of each sequence, two at least."""


@dataclass(frozen=True, slots=True)
class Scores:
    """Log-probabilities of tokens after a sequence's first, and which are likeliest: (T - 1,). In
    the places of these, the likeliest k tokens, ``top``, int32 (T - 1, k), and their
    log-probabilities ``top_logprobs``, the likeliest first, and those of other tokens that were
    asked for, ``of_others`` (T - 1, n)."""

    logprobs: np.ndarray
    is_likeliest: np.ndarray
    top: np.ndarray
    top_logprobs: np.ndarray
    of_others: np.ndarray = field(default_factory=lambda: np.zeros((0, 0), np.float32))


@dataclass(frozen=True, slots=True)
class _Asked:
    """Numbers that are asked for beside the log-probabilities of the tokens themselves: the ``top``
    likeliest, and ``others`` of each sequence, ids (T - 1, n), or None."""

    top: int
    others: Sequence[np.ndarray | None]

    def of_batch(self, batch: Sequence[int], length: int) -> np.ndarray:
        """Return the other tokens of some sequences, int32 (rows, ``length``, most n), with 0
        behind."""
        given = [self.others[i] for i in batch] if self.others else []
        most = max((each.shape[1] for each in given if each is not None), default=0)
        found = np.zeros((len(batch), length, most), np.int32)
        for row, each in enumerate(given):
            if each is not None:
                found[row, : each.shape[0], : each.shape[1]] = each
        return found


@dataclass(frozen=True, slots=True)
class _Due:
    """Hidden states on their way into a ``buffer``."""

    buffer: mx.array
    handle: Handle


def _padded(sequences: Sequences) -> np.ndarray:
    """Return the sequences as rows of tokens, with zeros behind."""
    tokens = np.zeros((len(sequences), max(map(len, sequences))), np.int32)
    for row, sequence in enumerate(sequences):
        tokens[row, : len(sequence)] = sequence
    return tokens


class Scorer:
    """A rank's part in scoring, ``rows`` and ``chunk`` positions at a time: the layers of its hops
    on a ``route``, which are by default its stage, ``parts``. Ranks beyond the route's mesh have no
    part in it."""

    def __init__(
        self,
        transport: Transport,
        parts: Sequence[Slice],
        rows: int,
        chunk: int,
        route: TokenRoute | None = None,
    ) -> None:
        self._transport = transport
        self._rows = rows
        self._chunk = chunk
        self._route = route or TokenRoute.of(Mesh(1, transport.size))
        self._parts = dict(zip(self._route.numbers(transport.rank), parts, strict=True))
        """The layers of each hop, by its number."""
        self._sharing = self._route.mesh.sharing(transport.rank)
        self._outbox = Outbox(transport)

    def score(
        self,
        sequences: Sequences,
        top: int = 0,
        others: Sequence[np.ndarray | None] = (),
    ) -> list[Scores]:
        """Return, on rank 0, the sequences' scores, with the ``top`` likeliest tokens, and those of
        ``others`` at each place after the first: ids (T - 1, n) of each sequence, or None. All
        ranks score the same ones."""
        has_part = self._transport.rank < self._route.mesh.size
        mine = self._scored(sequences, _Asked(top, others)) if has_part else {}
        everyone = self._transport.gather(mine, what="scores")
        end = self._route.end
        return [] if everyone is None else [everyone[end][i] for i in range(len(sequences))]

    def _scored(self, sequences: Sequences, asked: _Asked) -> dict[int, Scores]:
        """Return the scores of sequences by number, on ranks of the last stage."""
        # Sequences of a batch have about the same length.
        order = sorted(range(len(sequences)), key=lambda i: len(sequences[i]), reverse=True)
        batches = [order[at : at + self._rows] for at in range(0, len(order), self._rows)]
        of_batches = [_padded([sequences[i] for i in batch]) for batch in batches]
        mine: dict[int, Scores] = {}
        due = self._receive(of_batches[0]) if of_batches else {}
        for number, batch in enumerate(batches):
            tokens = of_batches[number]
            now_due = due
            due = self._receive(of_batches[number + 1]) if number + 1 < len(batches) else {}
            others = asked.of_batch(batch, tokens.shape[1] - 1)
            scores = self._compute(f"scoring, batch {number}", tokens, now_due, asked.top, others)
            if scores is None:
                continue
            for row, i in enumerate(batch):
                count = len(sequences[i]) - 1
                mine[i] = Scores(*(each[row, :count] for each in scores))
        self._outbox.drain(0)
        return mine

    def _compute(
        self,
        doing: str,
        tokens: np.ndarray,
        due: Mapping[int, _Due],
        top: int,
        others: np.ndarray,
    ) -> list[np.ndarray] | None:
        """Compute a batch on all hops of this rank, of which some are ``due`` hidden states; return
        the fields of ``Scores``, on ranks of the last hop."""
        rank = self._transport.rank
        name = self._transport.name
        what = f"{name(rank)}, {doing}"
        self._transport.activity.begin(doing)
        scores = None
        for hop, part in self._parts.items():
            if hop in due:
                x = due[hop].buffer
                waiting = f"{what}, waiting for {name(self._route.giver(hop, rank))}"
                self._transport.wait(due[hop].handle, partial(str, waiting))
            else:
                x = mx.array(tokens[:, :-1])
            with losses_named(self._transport, self._sharing, partial(str, what)):
                hidden = mx.contiguous(part(x, attention_chunk=self._chunk))
                mx.eval(hidden)
            if part.is_last:
                scores = self._scores(part, hidden, tokens[:, 1:], top, others)
            else:
                taker = self._route.taker(hop, rank)
                self._outbox.send(hidden, taker, HIDDEN_TAG, doing)
                self._outbox.drain(UNSENT)
        return scores

    def _receive(self, tokens: np.ndarray) -> dict[int, _Due]:
        """Begin to receive the hidden states of a batch, for each hop but the first of all."""
        rows, length = tokens.shape
        due = {}
        for hop, part in self._parts.items():
            if not part.is_first:
                buffer = new_buffer((rows, length - 1, part.hidden_size), part.dtype)
                giver = self._route.giver(hop, self._transport.rank)
                handle = self._transport.receive(buffer, giver, HIDDEN_TAG)
                due[hop] = _Due(buffer, handle)
        return due

    def _scores(
        self,
        part: Slice,
        hidden: mx.array,
        targets: np.ndarray,
        top: int,
        others: np.ndarray,
    ) -> list[np.ndarray]:
        """Return the fields of ``Scores`` for ``targets`` (rows, T) and ``others`` (rows, T, n),
        each (rows, T) or (rows, T, top) or (rows, T, n)."""
        found: list[list[np.ndarray]] = []
        wanted = mx.array(targets)
        wanted_too = mx.array(others)
        positions = max(1, self._chunk // len(targets))  # logits are large
        for start in range(0, hidden.shape[1], positions):
            here = slice(start, start + positions)
            logits = part.logits(part.norm(hidden[:, here])).astype(mx.float32)
            logprobs = nn.log_softmax(logits)
            own = mx.take_along_axis(logprobs, wanted[:, here, None], axis=-1)[..., 0]
            is_own = mx.argmax(logits, axis=-1) == wanted[:, here]
            likeliest = mx.zeros((*own.shape, 0), mx.int32)
            if top:
                likeliest = mx.argsort(-logprobs, axis=-1)[..., :top].astype(mx.int32)
            of_likeliest = mx.take_along_axis(logprobs, likeliest, axis=-1)
            of_others = mx.take_along_axis(logprobs, wanted_too[:, here], axis=-1)
            arrays = (own, is_own, likeliest, of_likeliest, of_others)
            mx.eval(arrays)
            found.append([np.array(each) for each in arrays])
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
