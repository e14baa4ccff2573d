"""The weights that an island shares with others, on one rank.

All ranks of the island take part in a report, and in taking a version, tensor by tensor; rank 0 has
the file. They keep what they train between the two, on top of the new weights::

    ranks    update 98, 99, 100   differences to rank 0   101, 102, ...   new weights from rank 0
    link                                    upload, wait for the next version, download
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import IO

import mlx.core as mx
import numpy as np

from shardmlx.distributed.crew import takes_long, together
from shardmlx.engine.engine import Engine
from shardmlx.engine.optimizer import Updater
from shardmlx.errors import file_access
from shardmlx.islands.client import CHANGE, OWN
from shardmlx.islands.encodings import Data, Encoding, encoding_named
from shardmlx.islands.protocol import SharedTensor, Terms, fragments_of

BASE = "base"
BEFORE = "before"
"""Kinds of arrays in a checkpoint: weights of the hub, and the bytes of the last difference."""


@dataclass(frozen=True, slots=True)
class Sharing:
    """The trained tensors that an island shares, in the hub's terms, as all its ranks know them."""

    terms: Terms
    tensors: tuple[SharedTensor, ...]

    @property
    def fragments(self) -> tuple[tuple[SharedTensor, ...], ...]:
        """The tensors of each fragment."""
        return fragments_of(self.tensors, self.terms.fragments)


@dataclass(frozen=True, slots=True)
class HeldTensors:
    """The shared tensors that a rank holds, and those that it updates."""

    held: frozenset[str]
    updated: frozenset[str]


@dataclass(frozen=True, slots=True)
class TakenVersion:
    """A version of a ``fragment`` that came in a form. Local weights are set by it, and keep on top
    what the report did not tell, if it ``keeps_rest``. A report that the hub has refused is
    forgotten."""

    fragment: int
    version: int
    form: str
    is_refused: bool
    keeps_rest: bool


class SharedWeights:
    """The part of one rank in what an island shares. Rank 0 has the files of all ranks."""

    def __init__(self, sharing: Sharing, engine: Engine, updater: Updater) -> None:
        self._transport = engine.transport
        self._shards = engine.shards
        self._updater = updater
        self._terms = sharing.terms
        self._fragments = sharing.fragments
        self._encoding = encoding_named(self._terms.encoding)
        self._mine = {name for stage in engine.stages.values() for name in stage.names}
        self._held = {name for name in self._mine if engine.shards.holds(name)}
        self._owned: set[str] = set()
        self._owners: Mapping[str, int] = {}
        self._holders: Mapping[str, Sequence[int]] = {}
        self._base: dict[str, mx.array] = {}
        self._before: dict[str, Data] = {}
        """Bytes of the last difference of each tensor, where they help to encode the next."""
        self._reported: dict[str, mx.array] = {}
        """Local weights as the reports that are under way tell them."""
        self.has_taken = False
        """True once trained weights of the hub have come to this run."""

    def held(self) -> HeldTensors:
        """Return what this rank has of the tensors."""
        updated = frozenset(name for name in self._held if self._updater.updates(name))
        return HeldTensors(frozenset(self._held), updated)

    def share(self, of_ranks: Sequence[HeldTensors]) -> None:
        """Take note of what the ranks have: the first that updates a tensor owns it."""
        names = [each.name for fragment in self._fragments for each in fragment]
        self._holders = {
            name: [rank for rank, each in enumerate(of_ranks) if name in each.held]
            for name in names
        }
        self._owners = {
            name: next(rank for rank, each in enumerate(of_ranks) if name in each.updated)
            for name in names
        }
        me = self._transport.rank
        self._owned = {name for name in self._held if self._owners[name] == me}

    # Checkpoints.

    def arrays(self) -> dict[str, mx.array]:
        """Return the arrays that a checkpoint needs of this rank."""
        return {f"{BASE}.{name}": self._base[name] for name in self._owned} | {
            f"{BEFORE}.{name}": mx.array(data) for name, data in self._before.items()
        }

    def takes(self, key: str) -> bool:
        """Tell whether this rank needs an array of a checkpoint."""
        kind, _, name = key.partition(".")
        return name in {BASE: self._held, BEFORE: self._owned}.get(kind, ())

    def restore(self, arrays: Iterable[tuple[str, mx.array]]) -> None:
        """Take this rank's arrays of a checkpoint."""
        for key, array in arrays:
            kind, _, name = key.partition(".")
            if kind == BASE:
                self._base[name] = array
            else:
                self._before[name] = np.array(array)

    # Commands of rank 0.

    @takes_long
    def wait(self, what: str) -> None:
        """Expect that rank 0 waits for the hub before it gives the next command."""
        self._transport.activity.begin(what)

    @together
    @takes_long
    def seed(self, fragment: int, body: IO[bytes] | None) -> None:
        """Take this island's own weights for the first of the hub, and write them into rank 0's
        file. Raises ``UserError``."""
        for name in self._names(fragment):
            self._base[name] = self._local(name)
            mx.eval(self._base[name])
        whole = Encoding()
        self._collect(fragment, body, lambda name: whole.encode(np.array(self._base[name])))

    @together
    @takes_long
    def report(self, fragment: int, body: IO[bytes] | None) -> None:
        """Write the difference of a fragment into rank 0's file. Raises ``UserError``."""
        self._collect(fragment, body, self._encoded)
        self._reported |= {name: self._updater.trained(name) for name in self._names(fragment)}
        if self._encoding.is_lossy:
            # Whatever the hub was not told stays in the local weights, and so in the next
            # difference: step-ahead error feedback (Xu et al., arXiv:2008.05823).
            for name, told in self._handed_out(fragment, self._encoding, body):
                self._reported[name] = self._comparable_base(name) - told
                mx.eval(self._reported[name])

    @together
    @takes_long
    def take(self, taken: TakenVersion, body: IO[bytes] | None) -> None:
        """Take a version, whose bytes rank 0 has in a file: set bases, and local weights by them,
        which after the last step are the hub's."""
        names = [each.name for each in self._fragments[taken.fragment]]
        if taken.is_refused:
            for name in names:
                self._reported.pop(name, None)
        if taken.form != OWN:
            is_change = taken.form == CHANGE
            encoding = self._encoding if is_change else Encoding()
            for name, new in self._handed_out(taken.fragment, encoding, body):
                base = self._base[name] + new if is_change else new
                self._merge(name, base, keeps_rest=taken.keeps_rest)
            self.has_taken |= taken.version > 0
        self._shards.start_gather([name for name in names if name in self._mine])
        self._shards.finish_gather()

    def _encoded(self, name: str) -> Data:
        change = np.array(self._comparable_base(name) - self._local(name))
        data = self._encoding.encode(change, self._before.get(name))
        if self._encoding.warm_starts:
            self._before[name] = data
        return data

    def _comparable_base(self, name: str) -> mx.array:
        # A base that local weights cannot be is no difference.
        return self._base[name].astype(self._updater.trained(name).dtype).astype(mx.float32)

    def _local(self, name: str) -> mx.array:
        return self._updater.trained(name).astype(mx.float32)

    def _names(self, fragment: int) -> list[str]:
        """Return the names of a fragment's tensors that this rank holds."""
        return [each.name for each in self._fragments[fragment] if each.name in self._held]

    def _merge(self, name: str, base: mx.array, *, keeps_rest: bool) -> None:
        """Set a base, and local weights to it, on top with the rest that the report did not tell:
        trained since, or left out by the encoding."""
        now = self._updater.trained(name)
        reported = self._reported.pop(name, None)
        weight = base
        if reported is not None:
            then = reported.astype(mx.float32)
            if (share := self._terms.optimizer.elastic) != 1:
                weight = then + share * (base - then)
            if keeps_rest and now is not reported:
                weight = weight + (now.astype(mx.float32) - then)
        self._updater.replace(name, weight)
        self._base[name] = base

    def _collect(
        self, fragment: int, body: IO[bytes] | None, encoded: Callable[[str], np.ndarray]
    ) -> None:
        """Write the encoded tensors of a fragment into rank 0's file."""
        rank = self._transport.rank
        for name in (each.name for each in self._fragments[fragment]):
            owner = self._owners[name]
            what = f"reporting {name}"
            data = encoded(name) if rank == owner else None
            if rank == 0 and owner != 0:
                data = self._transport.receive_object(owner, what)
            elif rank == owner != 0:
                self._transport.send_object(data, 0, what)
            if body is not None and data is not None:
                with file_access("write", body.name):
                    body.write(data.data)

    def _handed_out(
        self, fragment: int, encoding: Encoding, body: IO[bytes] | None
    ) -> Iterator[tuple[str, mx.array]]:
        """Yield the tensors of a fragment that this rank holds; rank 0 has all bytes in a file."""
        if body is not None:
            body.seek(0)
        for tensor in self._fragments[fragment]:
            holders = self._holders[tensor.name]
            what = f"taking {tensor.name}"
            data = None
            if body is not None:
                data = body.read(encoding.nbytes(tensor.shape))
                for peer in filter(None, holders):
                    self._transport.send_object(data, peer, what)
            elif self._transport.rank in holders:
                data = self._transport.receive_object(0, what)
            if tensor.name in self._held and data is not None:
                array = encoding.decode(np.frombuffer(data, np.uint8), tensor.shape)
                yield tensor.name, mx.array(array)
