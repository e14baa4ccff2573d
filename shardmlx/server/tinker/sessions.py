"""Sessions of clients, with their models and samplers. No MLX, no MPI."""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from shardmlx.api.requests import LoraOptions
from shardmlx.errors import UserError
from shardmlx.server.openai_errors import ApiError, shown

SECONDS_OF_SILENCE = 600.0
"""Seconds without a heartbeat, of which the SDK sends six a minute, after which a session ends."""


_ID = re.compile(r"([0-9a-f]{8})-[0-9a-f]{12}(:.*)?", re.DOTALL)
"""An id that a server gave: the number of its start comes first."""


class StartedAnew(RuntimeError):
    """A client asks for something of an earlier start of this server: that is no fault of its."""


@dataclass(eq=False)
class Model:
    """A model that trains: its LoRA, and what its client said of it."""

    name: str
    session: str
    lora: LoraOptions
    user_metadata: Mapping[str, Any] = field(default_factory=dict)
    base_model: str = ""
    last_number: int = 0
    """The number of the last of its requests."""
    last_request: datetime = field(default_factory=lambda: datetime.now(UTC))
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held by the request that is next to be submitted."""

    def begin(self, number: int) -> None:
        """Note that request ``number`` has come. Raises ``UserError`` if it is not its turn."""
        if number <= self.last_number:
            problem = f"seq_id is {number}, and {self.last_number} has come before"
            raise UserError(problem, "number the requests of a model in the order of sending")
        self.last_number = number
        self.last_request = datetime.now(UTC)


@dataclass(eq=False)
class HeldSnapshot:
    """A copy of a LoRA in memory, from which clients sample; ``state`` is the saved one of which it
    is a copy, if it is one, ``saved_at`` this time. Only such a copy can be made again."""

    name: str
    state: str | None = None
    saved_at: float | None = None
    is_loaded: bool = False
    samples: int = 0
    """The samples that need it now."""
    last_used: float = field(default_factory=time.monotonic)
    loading: asyncio.Lock = field(default_factory=asyncio.Lock)


@dataclass(eq=False)
class Completions:
    """The requests of a sampler's client that have ended, the first of them first; ``trimmed`` of
    them the client has seen."""

    request_ids: list[str] = field(default_factory=list)
    trimmed: int = 0

    @property
    def cursor(self) -> int:
        """The number of all that have ended so far."""
        return self.trimmed + len(self.request_ids)

    def after(self, cursor: int) -> list[str]:
        """Return those that ended after the first ``cursor``, and forget these."""
        seen = min(max(0, cursor - self.trimmed), len(self.request_ids))
        del self.request_ids[:seen]
        self.trimmed += seen
        return list(self.request_ids)


@dataclass(eq=False)
class SamplingSession:
    """The source of a client's samples: a ``snapshot``, or the base if it is None."""

    name: str
    session: str
    base_model: str
    snapshot: HeldSnapshot | None = None
    clones: int = 0
    """The clones of its client that have joined."""
    completions: dict[int, Completions] = field(default_factory=lambda: defaultdict(Completions))
    """The requests that have ended, for each clone of its client."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def complete(self, clone: int, request_id: str) -> None:
        """Note that a request has ended, and wake who waits for it."""
        self.completions[clone].request_ids.append(request_id)
        self.changed.set()
        self.changed = asyncio.Event()


@dataclass(eq=False)
class Session:
    """A client program: it is there as long as its heartbeats come."""

    name: str
    user_metadata: Mapping[str, Any] = field(default_factory=dict)
    display_name: str | None = None
    heard: float = field(default_factory=time.monotonic)


class Registry:
    """The sessions, models, samplers and snapshots that there are. Everything is called on the
    event loop's thread."""

    def __init__(
        self, earlier_end: str = "", seconds_of_silence: float = SECONDS_OF_SILENCE
    ) -> None:
        """Begin with nothing; ``earlier_end`` tells how the start before this one ended, if that is
        known. A session ends after ``seconds_of_silence``."""
        self._seconds_of_silence = seconds_of_silence
        self._start = secrets.token_hex(4)
        after = f" after {earlier_end}" if earlier_end else ""
        self.started_anew = f"the server was started anew{after}"
        self.sessions: dict[str, Session] = {}
        self.models: dict[str, Model] = {}
        self.samplers: dict[str, SamplingSession] = {}
        self.snapshots: dict[str, HeldSnapshot] = {}

    def new_session(self, metadata: Mapping[str, Any] | None, display_name: str | None) -> Session:
        """Begin a session."""
        name = f"{self._start}-{secrets.token_hex(6)}"
        session = Session(name, dict(metadata or {}), display_name)
        self.sessions[name] = session
        return session

    def session(self, name: str) -> Session:
        """Return a session that goes on. Raises ``ApiError`` 410 if it does not."""
        session = self.sessions.get(name)
        if session is None:
            raise ApiError(410, f"the session {shown(name)} is over, or was never begun here")
        session.heard = time.monotonic()
        return session

    def model(self, name: str) -> Model:
        """Return a model. Raises ``UserError``, and ``StartedAnew``."""
        if name not in self.models:
            self._refuse_earlier(name)
            raise UserError(f"there is no model {shown(name)} here", "create it, or load a state")
        return self.models[name]

    def sampler(self, name: str) -> SamplingSession:
        """Return a sampler. Raises ``UserError``, and ``StartedAnew``."""
        if name not in self.samplers:
            self._refuse_earlier(name)
            raise UserError(f"there is no sampler {shown(name)} here", "create a sampling client")
        return self.samplers[name]

    def is_earlier(self, name: str) -> bool:
        """Tell whether an id was given at another start of a server."""
        match = _ID.fullmatch(name)
        return match is not None and match[1] != self._start

    def _refuse_earlier(self, name: str) -> None:
        if self.is_earlier(name):
            raise StartedAnew(
                f"{self.started_anew}, and has {shown(name)} in memory no more: go on from its "
                "last saved state, with create_training_client_from_state_with_optimizer"
            )

    def hear(self, name: str) -> None:
        """Note that the client of a session asks for something, if the session goes on."""
        if name in self.sessions:
            self.sessions[name].heard = time.monotonic()

    def silent(self, seconds: float | None = None) -> list[Session]:
        """Return the sessions whose clients were not heard for so many seconds, by default for as
        long as ends a session."""
        long_ago = time.monotonic() - (self._seconds_of_silence if seconds is None else seconds)
        return [each for each in self.sessions.values() if each.heard < long_ago]

    def most_silent(self, spared: str) -> Session | None:
        """Return the session with models that was not heard for longest, but for the ``spared``
        one; None if there is none."""
        owners = {each.session for each in self.models.values()} - {spared}
        found = [each for each in self.sessions.values() if each.name in owners]
        return min(found, key=lambda each: each.heard, default=None)

    def end(self, session: Session) -> tuple[list[Model], list[SamplingSession]]:
        """Forget a session; return its models and samplers, which are forgotten too."""
        del self.sessions[session.name]
        models = [each for each in self.models.values() if each.session == session.name]
        samplers = [each for each in self.samplers.values() if each.session == session.name]
        for model in models:
            del self.models[model.name]
        for sampler in samplers:
            del self.samplers[sampler.name]
        return models, samplers


def least_used(snapshots: Iterable[HeldSnapshot]) -> HeldSnapshot | None:
    """Return the snapshot that was used least lately, of those in memory that no sample needs; None
    if there is none."""
    idle = [each for each in snapshots if each.is_loaded and not each.samples]
    return min(idle, key=lambda each: each.last_used, default=None)
