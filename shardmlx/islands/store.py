"""The hub's directory: the newest versions of each fragment, and reports that do not count yet.

``run.json`` has what the first island said, ``tokens/NAME`` the secret of each. ``fragment-000``
has a directory a version, ``v0000007``: raw float32 tensors one after the other, and facts, which
say what is counted. A report is a body and its own facts behind it. Names appear once all that
they name is on the disk, and a report goes once a version counts it: whatever is killed at whatever
point, the newest version and the reports that it does not count are the whole truth.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import reduce
from itertools import chain, groupby
from operator import add, attrgetter
from pathlib import Path
from typing import Any

import numpy as np

from shardmlx.common.durable_files import (
    PARTIAL,
    NewFiles,
    flush_directory,
    flush_to_disk,
    lock_file,
    pieces_of,
    replace_durably,
    write_durably,
)
from shardmlx.errors import UserError, refusing
from shardmlx.islands.encodings import Encoding, encoding_named
from shardmlx.islands.protocol import NAME, Join, SharedTensor, Terms, body_bytes, fragments_of
from shardmlx.modelfiles.safetensors_header import header_of
from shardmlx.modelfiles.sources import ADAPTER_CONFIG_FILE, ADAPTER_FILE

PUBLISHED, OUTER, MOMENTUM, CHANGE, FACTS = "published", "outer", "momentum", "change", "facts"
"""Files of a version. ``outer`` and ``change`` are there if the encoding is lossy."""

FLOAT32 = encoding_named("float32")

LEAST_TOKEN = 16
"""Characters of a token at least."""

KEPT = 2
"""Versions of a fragment on the disk: whoever reads the one before the newest shall finish."""

Differences = Iterator[np.ndarray]
Step = Callable[[np.ndarray, np.ndarray | None, Differences], tuple[np.ndarray, np.ndarray | None]]
"""A function of a tensor's weights and momentum, and of the difference of each island, that returns
the new weights and momentum."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A difference that an island sent: from its life and base, and with the work behind it."""

    island: str
    life: int
    base: int
    rows: int
    tokens: int
    norm: float = 0.0

    @property
    def place(self) -> tuple[int, int]:
        """Place among an island's reports: each replaces one of the same place."""
        return self.life, self.base

    def contains(self, other: Report) -> bool:
        """Return whether another report has a part of the work of this one, and no more."""
        is_of_same = (self.island, self.place) == (other.island, other.place)
        return is_of_same and self.rows > other.rows

    @property
    def file(self) -> str:
        """The name of the file with its body."""
        return f"{self.island}.{self.life}.{self.base}.report"


@dataclass(frozen=True, slots=True)
class VersionFacts:
    """The last report of each island that a version counts, and the tokens of all."""

    counted: Mapping[str, Report] = field(default_factory=dict)
    tokens: int = 0

    @classmethod
    def of_json(cls, counted: Mapping[str, Any], tokens: int) -> VersionFacts:
        """Return the facts that ``facts.json`` has of a version."""
        return cls({name: Report(**each) for name, each in counted.items()}, tokens)

    def last_place(self, island: str) -> tuple[int, ...]:
        """Return the place of the last counted report of an island; without one, one before all."""
        report = self.counted.get(island)
        return () if report is None else report.place

    def with_reports(self, reports: Sequence[Report]) -> VersionFacts:
        """Return the facts of the next version, which counts these reports."""
        counted = {**self.counted, **{each.island: each for each in reports}}
        return VersionFacts(counted, self.tokens + sum(each.tokens for each in reports))


class FragmentStore:
    """A fragment on the disk."""

    def __init__(self, directory: Path, tensors: Sequence[SharedTensor], encoding: str) -> None:
        self.directory = directory
        self.tensors = tensors
        self.lock = threading.Lock()
        """Held by whoever changes it."""
        self._encoding = encoding_named(encoding)
        self.report_bytes = body_bytes(tensors, encoding)
        self.seed_bytes = body_bytes(tensors, "float32")
        self.version: int | None = None
        self.facts = VersionFacts()
        self.pending: list[Report] = []
        """Reports that no version counts, by island, those of each in their order."""
        directory.mkdir(exist_ok=True)
        for partial in directory.glob(f"{PARTIAL}*"):
            _remove(partial)
        versions = sorted(int(each.name[1:]) for each in directory.glob("v*"))
        if versions:
            self.version = versions[-1]
            self.facts = VersionFacts.of_json(**json.loads(self.path(FACTS).read_bytes()))
        for path in directory.glob("*.report"):
            with path.open("rb") as file:
                file.seek(self.report_bytes)
                self.pending.append(Report(**json.load(file)))
        self._clean()

    def path(self, part: str, version: int | None = None) -> Path:
        """Return the file of a part of a version, by default of the newest."""
        number = self.version if version is None else version
        return self.directory / f"v{number:07}" / part

    def new_file(self) -> Path:
        """Return the path of a file for a body that is on its way: it is gone at the next start."""
        return self.directory / f"{PARTIAL}{secrets.token_hex(8)}"

    def seed(self, body: Path) -> None:
        """Make version 0 of a file with an island's weights."""

        def write(directory: Path) -> None:
            os.replace(body, directory / PUBLISHED)
            if self._encoding.is_lossy:
                shutil.copyfile(directory / PUBLISHED, directory / OUTER)

        self._commit(0, VersionFacts(), write)

    @property
    def masked_bytes(self) -> int:
        """Bytes of a report to a secure sum."""
        return 2 * self.seed_bytes

    def decoded(self, body: Path, *, is_seed: bool = False) -> Iterator[np.ndarray]:
        """Yield the tensors of a body. Raises ``ValueError`` for what none can be."""
        encoding = FLOAT32 if is_seed else self._encoding
        at = 0
        for tensor in self.tensors:
            yield _read(body, at, tensor, encoding)
            at += encoding.nbytes(tensor.shape)

    def add(self, body: Path, report: Report) -> None:
        """Keep a report, whose body is a file: once this returns it is not lost."""
        with body.open("ab") as file:
            file.write(json.dumps(asdict(report)).encode())
        replace_durably(body, self.directory / report.file)
        self.pending = [*(each for each in self.pending if each.file != report.file), report]
        self._drop_counted()

    def advance(self, reports: Sequence[Report], step: Step, mean: Path | None = None) -> None:
        """Make the next version of pending reports: of each, one tensor at a time is in memory.
        Where no single difference is known, a file has their ``mean``, which is the only one."""
        if self.version is None:
            raise ValueError("this fragment has no weights yet")
        encoding = self._encoding
        old = self.path(PUBLISHED).parent
        has_momentum = (old / MOMENTUM).exists()
        has_last = (old / CHANGE).exists()

        def write(directory: Path) -> None:
            at = encoded_at = 0
            for tensor in self.tensors:
                encoded = encoding.nbytes(tensor.shape)
                differences = self._differences(reports, encoded_at, tensor)
                if mean is not None:
                    differences = iter([_read(mean, at, tensor)])
                published = _read(old / PUBLISHED, at, tensor)
                weights = _read(old / OUTER, at, tensor) if encoding.is_lossy else published
                momentum = _read(old / MOMENTUM, at, tensor) if has_momentum else None
                new, momentum = step(weights, momentum, differences)
                if momentum is not None:
                    _append(directory / MOMENTUM, momentum)
                if encoding.is_lossy:
                    _append(directory / OUTER, new)
                    last = _bytes(old / CHANGE, encoded_at, encoded) if has_last else None
                    change = encoding.encode(new - published, last)
                    _append(directory / CHANGE, change)
                    new = published + encoding.decode(change, tensor.shape)
                _append(directory / PUBLISHED, new)
                at += tensor.nbytes
                encoded_at += encoded

        self._commit(self.version + 1, self.facts.with_reports(reports), write)

    def _differences(self, reports: Sequence[Report], at: int, tensor: SharedTensor) -> Differences:
        """Yield the difference of each island, the sum of its reports."""
        for _, own in groupby(reports, attrgetter("island")):
            bodies = (self.directory / each.file for each in own)
            yield reduce(add, (_read(body, at, tensor, self._encoding) for body in bodies))

    def _commit(self, version: int, facts: VersionFacts, write: Callable[[Path], None]) -> None:
        """Let ``write`` fill the directory of a version, and then give it its name."""
        partial = self.directory / f"{PARTIAL}version"
        _remove(partial)
        partial.mkdir()
        write(partial)
        (partial / FACTS).write_text(json.dumps(asdict(facts)))
        for path in partial.iterdir():
            with path.open("rb+") as file:
                flush_to_disk(file)
        flush_directory(partial)
        final = self.path(FACTS, version).parent
        if final.exists():
            # A try failed as it flushed this name. The files go once no cut of the power gives
            # them the name again.
            aside = self.new_file()
            os.rename(final, aside)
            flush_directory(self.directory)
            _remove(aside)
        os.rename(partial, final)
        flush_directory(self.directory)
        self.version = version
        self.facts = facts
        self._clean()

    def _clean(self) -> None:
        """Remove what is not needed any more: counted reports, old versions."""
        self._drop_counted()
        for path in self.directory.glob("v*"):
            if int(path.name[1:]) <= (self.version or 0) - KEPT:
                _remove(path)

    def _drop_counted(self) -> None:
        """Order the reports that wait, and remove those that a version counts."""
        known = sorted(self.pending, key=attrgetter("island", "place"))
        # At once: other threads read it.
        self.pending = [each for each in known if each.place > self.facts.last_place(each.island)]
        for each in known:
            if each not in self.pending:
                _remove(self.directory / each.file)


def _read(path: Path, at: int, tensor: SharedTensor, encoding: Encoding = FLOAT32) -> np.ndarray:
    return encoding.decode(_bytes(path, at, encoding.nbytes(tensor.shape)), tensor.shape)


def _bytes(path: Path, at: int, count: int) -> np.ndarray:
    return np.fromfile(path, np.uint8, count, offset=at)


def _append(path: Path, array: np.ndarray) -> None:
    with path.open("ab") as file:
        array.tofile(file)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _token(path: Path) -> str:
    token = path.read_text(encoding="latin-1").strip()
    if len(token) < LEAST_TOKEN or not token.isascii():
        problem = f"{path} has no {LEAST_TOKEN} letters and digits"
        raise UserError(problem, "remove it, and start anew with --islands")
    return token


class Run:
    """The hub's whole directory, locked until ``close`` or the end of this process. One thread at a
    time may change what is not a fragment's. Raises ``UserError``."""

    def __init__(
        self,
        directory: Path,
        islands: Iterable[str],
        terms: Terms | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Open a directory for these islands and all that it knows; without terms as it is."""
        self.directory = directory
        self.terms = terms or Terms()
        if terms is None and not (directory / "tokens").is_dir():
            raise UserError(f"{directory} is not the directory of a hub", "name its --path")
        (directory / "tokens").mkdir(parents=True, exist_ok=True, mode=0o700)
        in_use = UserError(f"{directory} is used by another hub", "stop it, or name another --path")
        self._lock = lock_file(directory / "lock", in_use)
        self.tokens: dict[str, str] = {}
        self.first: Join | None = None
        self.lives: dict[str, int] = {}
        """Count of the times that each island joined."""
        self._clock = clock
        self._began = clock()
        """The beginning of the run, on the clock of this process."""
        self.id = secrets.token_hex(8)
        """Names the run: islands go on from no checkpoint of another."""
        self.fragments: tuple[FragmentStore, ...] = ()
        try:
            for name in islands:
                self._make_token(name)
            for path in sorted((directory / "tokens").iterdir()):
                if NAME.fullmatch(path.name):
                    self.tokens[path.name] = _token(path)
            if self._file.exists():
                self._go_on(terms)
        except BaseException:
            self.close()
            raise

    def _go_on(self, terms: Terms | None) -> None:
        with refusing(f"{self._file} is of no run that can go on", "name another --path"):
            run = json.loads(self._file.read_bytes())
            self.terms = Terms.of_json(run["terms"])
            first = Join.of_json(run["first"])
            self.lives = run["lives"]
            self._began = self._clock() - max(0.0, time.time() - run["began"])
            self.id = run["id"]
        if terms is not None:
            for name, own in self.terms.to_json().items():
                if getattr(terms, name) != own and name != "outer_optimizer":
                    problem = f"{name} is {getattr(terms, name)}, and {self.directory} has {own}"
                    raise UserError(problem, "give the same, or another --path")
            self.terms = terms
        self._open(first)

    @property
    def _file(self) -> Path:
        return self.directory / "run.json"

    @property
    def seconds(self) -> float:
        """Seconds since the run began. While this process lives, no setting of the machine's clock
        changes them."""
        return self._clock() - self._began

    def close(self) -> None:
        """Let another hub have the directory."""
        self._lock.close()

    def _make_token(self, name: str) -> None:
        if not NAME.fullmatch(name):
            raise UserError(f"--islands has {name!r}", "give small letters, digits, - and _")
        path = self.directory / "tokens" / name
        if not path.exists():
            partial = self.directory / f"{PARTIAL}token"
            partial.touch(0o600)
            write_durably(partial, secrets.token_urlsafe(32).encode())
            replace_durably(partial, path)

    def _open(self, first: Join) -> None:
        self.fragments = tuple(
            FragmentStore(self.directory / f"fragment-{k:03}", each, self.terms.encoding)
            for k, each in enumerate(fragments_of(first.tensors, self.terms.fragments))
        )
        self.first = first

    def join(self, island: str, message: Join) -> None:
        """Write down that an island has joined, of which the first says what is trained."""
        first = self.first or message
        if self.first is None:
            self._open(first)
        self.lives[island] = self.lives.get(island, 0) + 1
        content = {
            "terms": self.terms.to_json(),
            "first": first.to_json(),
            "lives": self.lives,
            "began": time.time() - self.seconds,
            "id": self.id,
        }
        partial = self.directory / f"{PARTIAL}run.json"
        write_durably(partial, json.dumps(content).encode())
        replace_durably(partial, self._file)

    def export(self, output: Path) -> None:
        """Write the outer weights as adapters, from which ``shardmlx export`` makes a model: one
        piece of a few MiB is in memory at a time. Raises ``UserError``, ``OSError``."""
        if self.first is None or any(each.version is None for each in self.fragments):
            raise UserError(f"{self.directory} has no weights yet", "let an island join")
        header = header_of((each.name, each.shape, "F32") for each in self.first.tensors)
        paths = [each.path(OUTER) for each in self.fragments]
        raw = [path if path.exists() else path.with_name(PUBLISHED) for path in paths]
        output.mkdir(parents=True, exist_ok=True)
        files = NewFiles(output)
        files.write(ADAPTER_CONFIG_FILE, [json.dumps(self.first.adapter_config, indent=4).encode()])
        pieces = (piece for path in raw for piece in pieces_of(path))
        files.write(ADAPTER_FILE, chain([header], pieces))
        files.publish()
