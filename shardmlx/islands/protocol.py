"""The messages between hub and islands, which both import: no disk, no network.

An *island* is one training job with a name. The hub holds the *outer weights*, float32, of all
trained tensors. They are divided into *fragments*: tensors of consecutive layers, which travel
together. The *version* of a fragment is the number of outer steps made on it. An island's *base*
is the version that it last took, and its *difference* is base minus local weights, so that an
outer step of SGD is ``weights -= rate * mean difference``. Numbers travel in little-endian order.

With a lossy encoding the hub publishes encoded changes. Islands then have the *published* weights,
the sum of these changes, for their base: what an encoding loses is in the next change.

Two rules let each piece of training count once. The hub gives each island that joins without a
checkpoint a new *life*: a report replaces the one of the same life and base, if it has no fewer
rows and so contains it, and adds to others. A report that is not after the last counted one, or is
before one that waits, is refused (409, with the newest ``version``): the island must take that
version first.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from itertools import groupby, zip_longest
from typing import Any, NamedTuple, Self

from shardmlx.common.yaml_reader import is_number
from shardmlx.config.options import OptionError, Options, in_group, refuse
from shardmlx.errors import UserError, refusing
from shardmlx.islands.encodings import encoding_named
from shardmlx.islands.outer import AVERAGE, NESTEROV, ROUNDS, SGD, OuterOptimizer

DILOCO, ASYNC, FEDAVG, PARAMETER_SERVER = "diloco", "async", "fedavg", "parameter-server"
MODES = (DILOCO, ASYNC, FEDAVG, PARAMETER_SERVER)

TRAINING = "what islands do"
"""Group of options."""

_training, _rounds = map(in_group, (TRAINING, ROUNDS))

NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,40}")
"""Form of an island's name, which is a file's name too."""

AGREE = "train the same model and tensors as the other islands"

MOST_NUMBERS = 1 << 40
"""Numbers along a side of a tensor, at most."""

_LAYER = re.compile(r"\.(\d+)\.")


class Refusal(UserError):
    """An answer of the hub with an HTTP status from 400, and ``more`` in its JSON."""

    def __init__(self, status: int, problem: str, remedy: str = "", /, **more: Any) -> None:
        super().__init__(problem, remedy)
        self.status = status
        self.more = more


@dataclass(frozen=True)
class Message:
    """Fields that travel as JSON. A subclass checks them when it is built."""

    @classmethod
    def of_json(cls, values: Any) -> Self:
        """Return the message that JSON says. Raises ``UserError``."""
        with refusing(f"{cls.__name__} is none", "use the same shardmlx"):
            return cls(**values)

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON takes them."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class Terms(Message, Options):
    """The way in which islands train and report. The hub sets it; an island learns it as it joins.

    Raises ``OptionError``.
    """

    mode: str = _training(DILOCO, "when differences count, and by what weights", choices=MODES)
    inner_steps: int = _training(
        100, "steps between two reports of an island; 1 for a parameter server", minimum=1
    )
    overlap: int = _training(0, "steps that it trains on while it waits for a round", minimum=0)
    fragments: int = _training(
        1, "parts of the model, which are sent one after the other", minimum=1
    )
    encoding: str = _training(
        "float32",
        "form of differences: float32, bfloat16, int8, top-k:SHARE, low-rank:RANK",
        metavar="FORM",
    )
    secure_sums: bool = _training(
        False, "the hub sees the sum of all differences alone, and not one island's"
    )
    outer_optimizer: str | None = _rounds(
        None,
        "what makes new weights of differences, with its learning rate: "
        "nesterov:RATE,MOMENTUM, sgd:RATE, average, elastic:RATE",
        unset=f"{NESTEROV}:0.7,0.9; {AVERAGE} for {FEDAVG}; {SGD} for {PARAMETER_SERVER}; {SGD}:2 "
        f"for top-k and low-rank, in {ASYNC} {SGD}",
        metavar="NAME",
    )

    @classmethod
    def settled(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Return flat values; islands of a parameter server report each step."""
        return {**values, "inner_steps": 1} if values["mode"] == PARAMETER_SERVER else values

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse(
            "overlap",
            f"is {self.overlap} with inner_steps {self.inner_steps}",
            "give fewer steps: a fragment is merged before its report",
            when=self.overlap >= self.inner_steps,
        )
        for name, value, usual in (
            ("mode", self.mode, FEDAVG),
            ("encoding", self.encoding, "float32"),
            ("fragments", self.fragments, 1),
        ):
            complaint = f"is {value} with secure_sums"
            refuse(name, complaint, f"give {usual}", when=self.secure_sums and value != usual)
        for name, made_of in (("encoding", encoding_named), ("outer_optimizer", OuterOptimizer.of)):
            text = getattr(self, name)
            try:
                made_of(text or NESTEROV)
            except ValueError as error:
                raise OptionError(name, f"is {text!r}", str(error)) from None

    @property
    def optimizer(self) -> OuterOptimizer:
        # Momentum repeats a difference for rounds before an encoding that defers has let islands
        # see it: they overshoot, and ever farther (as in SparseLoCo, arXiv:2508.15706). A rate of 2
        # makes up for what cancels out in a mean of islands; async takes each report alone.
        """The outer optimizer: the one that is named, or the usual one of the mode."""
        deferred = SGD if self.mode == ASYNC else f"{SGD}:2"
        diloco = deferred if encoding_named(self.encoding).defers else NESTEROV
        usual = {FEDAVG: AVERAGE, PARAMETER_SERVER: SGD}.get(self.mode, diloco)
        return OuterOptimizer.of(self.outer_optimizer or usual)

    @property
    def copies(self) -> int:
        """Float32 copies that an island has of each trained weight: its base, and of a report that
        is under way what it tells, if that is not what the weight still is."""
        return 1 + (encoding_named(self.encoding).is_lossy or self.overlap > 0)

    def due(self, step: int) -> tuple[int, ...]:
        """Return the fragments that an island reports after a step, counted from 1: each once in
        ``inner_steps``, evenly spaced, the last at their multiples (arXiv:2501.18512)."""
        place = step % self.inner_steps
        ends = ((k + 1) * self.inner_steps // self.fragments for k in range(self.fragments))
        return tuple(k for k, end in enumerate(ends) if end % self.inner_steps == place)


class SharedTensor(NamedTuple):
    """The name and the shape of a trained tensor."""

    name: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.name} {list(self.shape)}"

    @property
    def nbytes(self) -> int:
        """Bytes in float32."""
        return 4 * math.prod(self.shape)


def body_bytes(tensors: Sequence[SharedTensor], encoding: str) -> int:
    """Return the length of a body that holds tensors in this encoding."""
    return sum(map(encoding_named(encoding).nbytes, (each.shape for each in tensors)))


def fragments_of(
    tensors: Sequence[SharedTensor], count: int
) -> tuple[tuple[SharedTensor, ...], ...]:
    """Divide tensors, which are in the order of layers, into fragments of about equal bytes.

    A layer is never divided. Raises ``UserError`` if there are fewer layers than fragments.
    """
    layers = [tuple(of_layer) for _, of_layer in groupby(tensors, _layer_of)]
    if len(layers) < count:
        problem = f"fragments is {count}, and the model has {len(layers)} trained layers"
        raise UserError(problem, f"give {len(layers)} or less")
    whole = sum(each.nbytes for each in tensors)
    parts: list[list[SharedTensor]] = [[]]
    done = 0
    for index, layer in enumerate(layers):
        left = len(layers) - index
        is_full = done * count >= whole * len(parts) or left <= count - len(parts)
        if parts[-1] and len(parts) < count and is_full:
            parts.append([])
        parts[-1].extend(layer)
        done += sum(each.nbytes for each in layer)
    return tuple(map(tuple, parts))


def _layer_of(tensor: SharedTensor) -> str:
    """Return the number of a tensor's layer, or the module's name outside of layers."""
    found = _LAYER.search(tensor.name)
    return found[1] if found else tensor.name.rpartition(".")[0]


@dataclass(frozen=True, kw_only=True)
class Join(Message):
    """The first message of an island: ``POST /join``.

    ``name`` is what the island calls itself: its token must say the same. ``model`` says which
    model is trained and how: hub and island must agree on each of its values. ``adapter_config`` is
    what ``adapter_config.json`` holds. Raises ``TypeError`` and ``ValueError``.
    """

    name: str
    model: Mapping[str, Any]
    tensors: tuple[SharedTensor, ...]
    adapter_config: Mapping[str, Any]

    def __post_init__(self) -> None:
        tensors = tuple(SharedTensor(str(name), tuple(shape)) for name, shape in self.tensors)
        sizes = [size for each in tensors for size in each.shape]
        if not sizes or {*map(type, sizes)} != {int} or min(sizes) < 1 or max(sizes) > MOST_NUMBERS:
            raise ValueError("a shape that no tensor has")
        if len({each.name for each in tensors}) < len(tensors):
            raise ValueError("two tensors of one name")
        object.__setattr__(self, "tensors", tensors)
        object.__setattr__(self, "model", dict(self.model))
        object.__setattr__(self, "adapter_config", dict(self.adapter_config))

    def check_same(self, other: Join) -> None:
        """Raise ``UserError`` that names the first difference from another island's model."""
        for key in [*self.model, *other.model]:
            mine = self.model.get(key)
            its = other.model.get(key)
            if mine != its:
                raise UserError(f"the model's {key} is {mine!r}, and the hub's {its!r}", AGREE)
        for tensor, its in zip_longest(self.tensors, other.tensors, fillvalue="no tensor"):
            if tensor != its:
                raise UserError(f"{tensor} stands where the hub has {its}", AGREE)


@dataclass(frozen=True, kw_only=True)
class Joined(Message):
    """The hub's answer to ``Join``.

    ``run`` names the hub's run, and ``life`` is that of an island that does not go on from a
    checkpoint. ``versions`` has one for each fragment, None where the island is to upload its own
    weights (``PUT /fragments/K/seed``).
    """

    run: str
    terms: Terms
    versions: Sequence[int | None]
    life: int

    def __post_init__(self) -> None:
        if not isinstance(self.terms, Terms):
            object.__setattr__(self, "terms", Terms.of_json(self.terms))


@dataclass(frozen=True, kw_only=True)
class Progress(Message):
    """The heartbeat of an island: ``POST /progress``. The answer is {ended, evaluate}."""

    step: int
    tokens: int
    loss: float | None = None
    val_loss: float | None = None
    leaving: bool = False

    def __post_init__(self) -> None:
        losses = [each for each in (self.loss, self.val_loss) if each is not None]
        are_finite = all(is_number(each) and math.isfinite(each) for each in losses)
        if not are_finite or {type(self.step), type(self.tokens)} != {int}:
            raise ValueError("a value that is not a number")


def check_secure_sums(what: str) -> None:
    """Raise ``UserError`` if this Python lacks what secure sums need."""
    if find_spec("cryptography") is None:
        raise UserError(f"{what}: secure sums need cryptography", "pip install '.[privacy]'")


def report_path(fragment: int, *, life: int, base: int, rows: int, tokens: int) -> str:
    """Return where an island puts a report: the encoded difference from version ``base``, made with
    so many rows and tokens since its last counted one."""
    return f"/fragments/{fragment}/reports/{life}-{base}?rows={rows}&tokens={tokens}"
