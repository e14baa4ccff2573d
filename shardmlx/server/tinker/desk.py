"""Make requests to the service of those of clients, with futures. No MLX, no MPI.

Requests of one model are submitted in the order in which they came.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pydantic import BaseModel
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from tinker import types

from shardmlx.api.requests import (
    CreateModel,
    DropSnapshot,
    ForwardBackward,
    NoRoom,
    Request,
    SavedState,
    Service,
    TakeSnapshot,
    UnloadModel,
)
from shardmlx.common.formatting import plural
from shardmlx.common.reporter import Reporter
from shardmlx.errors import UserError
from shardmlx.server.body_reader import BodyReader
from shardmlx.server.model_names import ModelNames
from shardmlx.server.openai_errors import ApiError, shown
from shardmlx.server.tinker.answers import Answer
from shardmlx.server.tinker.checkpoints import path_of
from shardmlx.server.tinker.promises import Promise, Promises
from shardmlx.server.tinker.reading import read_json
from shardmlx.server.tinker.sessions import (
    HeldSnapshot,
    Model,
    Registry,
    Session,
    StartedAnew,
    least_used,
)

MOST_OPEN = 4096
"""Futures of a session whose results nobody has fetched."""

SECONDS_BETWEEN_LOOKS = 10.0
"""Seconds between two searches for sessions that are silent."""

SECONDS_OF_HEARTBEAT = 12.0
"""Seconds within which a client that lives is heard: the SDK sends a heartbeat every ten."""

SECONDS_TO_MAKE_ROOM = 3 * SECONDS_OF_HEARTBEAT
"""Seconds of silence after which a client's models make room for those of another one, and its
samples end."""

ATTEMPTS_PER_SNAPSHOT = 20
SECONDS_BETWEEN_ATTEMPTS = 0.05
"""Time for a dropped snapshot to leave the ranks, before another one is dropped too."""

_Message = TypeVar("_Message", bound=BaseModel)


@dataclass(eq=False)
class Desk:
    """The things that endpoints share. Everything is called on the event loop's thread."""

    service: Service
    names: ModelNames
    most_tokens: int
    """The tokens of a prompt and its answer together, at most."""
    bodies: BodyReader
    reporter: Reporter
    tokenizer: str | None = None
    """The place where clients find the tokenizer; None for the model's name."""
    registry: Registry = field(default_factory=Registry)
    promises: Promises = field(default_factory=Promises)
    _said: set[str] = field(default_factory=set)
    _timer: asyncio.TimerHandle | None = None

    async def read(self, request: HttpRequest, kind: type[_Message]) -> tuple[_Message, bytes]:
        """Return the message of a JSON body, and its digest. Raises ``ApiError``."""
        return await self.bodies.read(
            request, lambda body: (read_json(kind, body), digest_of(body))
        )

    def say_once(self, text: str) -> None:
        """Say something to who runs the server, the first time that it happens."""
        if text not in self._said:
            self._said.add(text)
            self.reporter.say(text)

    def check_base(self, name: str | None) -> str:
        """Return the name of the base that a client asks for. Raises ``UserError``."""
        try:
            self.names.check(name)
        except ApiError as error:
            raise UserError(str(error)) from None
        return self.names.first if name is None else name

    def submit(self, request: Request) -> asyncio.Future[Any]:
        """Hand a request to the service; return its future."""
        return asyncio.wrap_future(self.service.submit(request))

    # Futures.

    def promise(
        self,
        request_id: str,
        session: str,
        digest: bytes,
        begin: Callable[[], Awaitable[Any]],
        write: Callable[[Any], Answer],
        on_end: Callable[[Promise], None] = lambda promise: None,
        nbytes: int = 0,
        *,
        is_sample: bool = False,
    ) -> Promise:
        """Return the future of a request, whose work ``begin`` starts. A request that comes again
        has the same future. One that is refused has a future that fails. One that ``is_sample``
        ends while its client is silent."""
        known = self.promises.get(request_id)
        if known is not None and known.digest == digest:
            return known
        if self.promises.count(session) >= MOST_OPEN:
            message = f"{MOST_OPEN} results of this session wait to be fetched: fetch some first"
            raise ApiError(429, message, headers={"retry-after": "1"})
        try:
            if known is not None:
                problem = f"{request_id}: another request came with this seq_id before"
                request_id = f"{request_id}:{secrets.token_hex(4)}"
                raise UserError(problem, "give each request a seq_id of its own")
            work = begin()
        except (UserError, StartedAnew) as error:
            promise = self.promises.fail(Promise(request_id, session, digest), error)
            on_end(promise)
            return promise
        promise = Promise(request_id, session, digest, nbytes, is_sample=is_sample)
        return self.promises.begin(promise, work, write, on_end)

    def queue(
        self,
        name: str,
        number: int | None,
        digest: bytes,
        make: Callable[[Model], Request],
        write: Callable[[Any], Answer],
        nbytes: int = 0,
    ) -> Response:
        """Answer with the future of request ``number`` of a model, of ``nbytes``, which ``make``
        makes."""
        session = name.partition(":")[0]
        # One without a number of its own must not have the id of another.
        is_numbered = number is not None and number >= 1
        request_id = f"{name}:{number if is_numbered else secrets.token_hex(4)}"

        def begin() -> Awaitable[Any]:
            model = self.registry.model(name)
            if number is None or number < 1:
                raise UserError(f"seq_id is {number}", "number the requests of a model from 1")
            model.begin(number)
            return self._in_turn(model, make(model))

        promise = self.promise(request_id, session, digest, begin, write, nbytes=nbytes)
        return future_response(promise, model=name)

    async def _in_turn(self, model: Model, request: Request) -> Any:
        # The lock is fair, and a snapshot holds it until it is taken: what comes after must not
        # change the model before room for the snapshot is found.
        async with model.turn:
            if isinstance(request, TakeSnapshot):
                return await self.take(request)
            if isinstance(request, ForwardBackward):
                submitted = await self._submit_rows(request)
            else:
                submitted = self.submit(request)
        return await submitted

    async def _submit_rows(self, request: ForwardBackward) -> asyncio.Future[Any]:
        """Hand rows to the service, which checks and cuts them: on a thread of its own, since this
        takes a second for a thousand, and other clients want to be heard meanwhile."""
        handing = asyncio.ensure_future(asyncio.to_thread(self.service.submit, request))
        try:
            return asyncio.wrap_future(await asyncio.shield(handing))
        except asyncio.CancelledError:
            handing.add_done_callback(lambda done: done.result().cancel())
            raise

    async def create(self, request: CreateModel, session: str) -> None:
        """Make a model, in the place of those of a client that is lost if need be: a program that
        ends need not say so. Raises ``NoRoom``."""
        began = time.monotonic()
        while True:
            try:
                await self.submit(request)
                return
            except asyncio.CancelledError:
                # The ranks may have begun already; then there is a model that nobody knows of.
                ignore_result(self.submit(UnloadModel(request.name)))
                raise
            except NoRoom:
                silent = self.registry.most_silent(session)
                seconds = 0.0 if silent is None else time.monotonic() - silent.heard
                if silent is not None and seconds > SECONDS_TO_MAKE_ROOM:
                    self.reporter.say(f"Session {silent.name} makes room: its client is silent")
                    self.end_session(silent)
                elif seconds < SECONDS_OF_HEARTBEAT < time.monotonic() - began:
                    raise  # all clients live
                await asyncio.sleep(SECONDS_BETWEEN_ATTEMPTS)

    # Snapshots.

    async def take(self, request: TakeSnapshot) -> None:
        """Take a snapshot, in the place of those that nobody has used for long if need be. It is
        taken even if its client no longer waits for it: the ranks may have begun. Raises
        ``NoRoom``."""
        await asyncio.shield(self._take(request))

    async def _take(self, request: TakeSnapshot) -> None:
        for attempt in itertools.count():
            try:
                await self.submit(request)
                break
            except NoRoom:
                if attempt % ATTEMPTS_PER_SNAPSHOT == 0:
                    oldest = least_used(self.registry.snapshots.values())
                    if oldest is None:
                        raise
                    await self._drop(oldest)
                else:
                    await asyncio.sleep(SECONDS_BETWEEN_ATTEMPTS)
        snapshot = self.registry.snapshots.get(request.snapshot)
        if snapshot is None:  # its session has ended meanwhile
            await self.submit(DropSnapshot(request.snapshot))
        else:
            snapshot.is_loaded = True

    async def load(self, snapshot: HeldSnapshot) -> None:
        """Have a snapshot in memory, even if its client no longer waits for it. Raises
        ``UserError`` if it was forgotten for good."""
        # Others must not load it too meanwhile: the lock is held until it is there.
        await asyncio.shield(self._load(snapshot))

    async def _load(self, snapshot: HeldSnapshot) -> None:
        async with snapshot.loading:
            if snapshot.is_loaded:
                return
            if snapshot.state is None:
                raise UserError(
                    "the memory of this sampling client's weights was needed for later ones",
                    "sample from the last few that were saved, or give weights that must stay a "
                    "name: save_weights_for_sampler(name=...)",
                )
            state, saved_at = snapshot.state, snapshot.saved_at
            await self._take(TakeSnapshot(snapshot.name, state=state, saved_at=saved_at))

    async def _drop(self, snapshot: HeldSnapshot) -> None:
        snapshot.is_loaded = False
        await self.submit(DropSnapshot(snapshot.name))

    # Sessions.

    async def saved(self, state: str) -> SavedState:
        """Return a saved state. Raises ``UserError`` if there is none of that name."""
        states = await asyncio.to_thread(self.service.states)
        found = next((each for each in states if each.state == state), None)
        if found is None:
            raise UserError(
                f"there is no saved state {shown(path_of(state))}",
                "list_user_checkpoints shows all that there are",
            )
        return found

    def begin_session(self, metadata: dict[str, Any] | None, display_name: str | None) -> Session:
        """Begin a session, which ends when its client says so, or is silent for long."""
        if self._timer is None:
            self._look_later()
        return self.registry.new_session(metadata, display_name)

    def _look_later(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(SECONDS_BETWEEN_LOOKS, self._look)

    def _look(self) -> None:
        for session in self.registry.silent():
            self.reporter.say(f"Session {session.name}: its client has not been heard for long")
            self.end_session(session)
        for session in self.registry.silent(SECONDS_TO_MAKE_ROOM):
            if count := self.promises.give_up_samples(session.name):
                ended = f"{plural(count, 'sample')} of it ended"
                self.reporter.say(f"Session {session.name}: its client is silent, so {ended}")
        self._timer = None
        if self.registry.sessions:
            self._look_later()

    def end_session(self, session: Session) -> None:
        """Forget a session with its futures, models and snapshots. Its saved states stay."""
        models, samplers = self.registry.end(session)
        self.promises.expire(session.name)
        for model in models:
            ignore_result(self.submit(UnloadModel(model.name)))
        for sampler in samplers:
            snapshot = sampler.snapshot
            if snapshot is not None and snapshot.state is None:
                self.registry.snapshots.pop(snapshot.name, None)
                if snapshot.is_loaded:
                    ignore_result(self.submit(DropSnapshot(snapshot.name)))


def digest_of(body: bytes) -> bytes:
    """Return what tells a repeated request from another one."""
    return hashlib.blake2b(body, digest_size=16).digest()


def future_response(
    promise: Promise, *, model: str | None = None, sequences: list[str] | None = None
) -> Response:
    """Return the answer to a request: the id of its future."""
    return json_response(
        types.UntypedAPIFuture(
            request_id=promise.request_id, model_id=model, sample_sequence_ids=sequences
        )
    )


def json_response(message: BaseModel) -> Response:
    """Return the response that has a message."""
    return JSONResponse(message.model_dump(mode="json", exclude_none=True))


def ignore_result(future: asyncio.Future[Any]) -> None:
    """Let a request end whose result nobody needs."""
    future.add_done_callback(lambda done: done.cancelled() or done.exception())
