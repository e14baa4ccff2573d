"""The hub as an island sees it, over plain HTTP: only rank 0 of an island calls it.

Whatever fails on the way is tried again, for whoever waits to say how long: no report is lost, and
the hub counts none twice. A download goes on where it broke off.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import math
import os
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from http import HTTPStatus
from typing import IO, Any, NamedTuple, TypeVar

from shardmlx.errors import UserError, file_access, one_line
from shardmlx.islands.protocol import Join, Joined, Progress, Refusal, Terms

T = TypeVar("T")

TOKEN = "SHARDMLX_ISLAND_TOKEN"
"""Environment variable with the secret that the hub made for this island."""

PATIENCE = 60.0
"""Seconds without a sign of the hub after which an island goes on alone; the hub answers before."""

SECONDS_TO_CHECK = 900.0
"""Seconds in which the hub reads, checks and writes a report: of all of a large model, perhaps."""

PAUSES = (0.5, 10.0)
"""Seconds between two tries: the first, and the longest, each twice the one before."""

PIECE = 1 << 16
"""Bytes that are sent or written at a time."""

SECONDS_TO_LEAVE = 3.0
"""Seconds for the last heartbeat, for which the end of a run waits."""

OWN, CHANGE, WEIGHTS = "own", "change", "weights"
"""Forms in which a version comes: the island's first weights, the encoded change from its base, and
all weights."""

HEARTBEAT_SECONDS = 10.0
"""Seconds between two heartbeats: the hub takes an island for missing after some more."""


class HubAway(Exception):
    """The lack of an answer, which may come later."""


class Hub:
    """The hub at ``url``. Methods try once, and raise ``HubAway`` or ``Refusal``; ``persist`` tries
    again, and tells ``say`` so. Any thread may call them."""

    def __init__(self, url: str, token: str, say: Callable[[str], None]) -> None:
        self.url = url.rstrip("/")
        self._token = token
        self.say = say
        self.heard = time.monotonic()
        """The time at which the last bytes came or went."""
        self.closed = threading.Event()
        """Set once the run is over: nothing is tried again then."""

    @classmethod
    def of(cls, url: str, name: str, say: Callable[[str], None]) -> Hub:
        """Return the hub for the island ``name``, whose token is in the environment. Raises
        ``UserError``."""
        token = os.environ.get(TOKEN, "").strip()
        if not (token and token.isascii() and token.isprintable()):
            raise UserError(
                f"--island {url}: {TOKEN} holds no token",
                f"set it to the content of tokens/{name} in the hub's directory",
            )
        return cls(url, token, say)

    def persist(self, attempt: Callable[[], T], patience: float = PATIENCE) -> T:
        """Return what ``attempt`` returns, which is repeated after ``HubAway`` and if the hub says
        ``retry``. Raises ``UserError`` after ``patience`` seconds without a sign of the hub."""
        pause, longest = PAUSES
        answered = time.monotonic()
        while True:
            try:
                return attempt()
            except HubAway as error:
                problem = one_line(error)
            except Refusal as refusal:
                if not refusal.more.get("retry"):
                    raise
                problem = refusal.problem
                answered = time.monotonic()
            if pause == PAUSES[0]:
                self.say(f"--island {self.url}: {problem}; trying again")
            if self.closed.wait(pause) or time.monotonic() > max(self.heard, answered) + patience:
                raise UserError(
                    f"--island {self.url}: no answer in {patience:g} s: {problem}",
                    "start shardmlx hub, or see whether this machine reaches it",
                )
            pause = min(2 * pause, longest)

    def terms(self) -> Terms:
        """Return what the hub asks of islands."""
        return Terms.of_json(self._json("GET", "/status").get("terms"))

    def join(self, message: Join) -> Joined:
        """Let the island in: ``POST /join``."""
        return Joined.of_json(self._json("POST", "/join", message.to_json()))

    def progress(self, message: Progress) -> Mapping[str, Any]:
        """Send a heartbeat, and return its answer: ``POST /progress``."""
        return self._json("POST", "/progress", message.to_json())

    def post(self, path: str, message: Mapping[str, Any]) -> dict[str, Any]:
        """Send a message about a report, and return the answer."""
        return self._json("POST", path, message)

    def put(self, path: str, body: IO[bytes]) -> None:
        """Upload a whole file: a report, or a seed."""
        length = body.seek(0, os.SEEK_END)
        body.seek(0)
        headers = {"content-length": str(length), "content-type": "application/octet-stream"}
        with self._answer("PUT", path, self._pieces(body), headers, SECONDS_TO_CHECK) as answer:
            answer.read()

    def take(self, fragment: int, after: int | None, into: IO[bytes]) -> tuple[int, bool]:
        """Download the version of a fragment above ``after``, once there is one, or the newest if
        that is None, into a file. Return the version, and whether its bytes are the encoded change
        from ``after``. This one method persists by itself, since it knows what has come already.

        Raises ``Refusal`` with ``ended`` if no version will come.
        """
        path = f"/fragments/{fragment}" + ("" if after is None else f"?after={after}")
        etag = ""
        into.truncate(0)

        def attempt() -> tuple[int, bool] | None:
            nonlocal etag
            start = into.seek(0, os.SEEK_END)
            headers = {"range": f"bytes={start}-", "if-range": etag} if start else {}
            with self._answer("GET", path, headers=headers) as answer:
                if answer.status == HTTPStatus.NO_CONTENT and not self.closed.is_set():
                    return None
                if answer.status != HTTPStatus.PARTIAL_CONTENT:
                    into.seek(0)
                    into.truncate()
                etag = answer.headers["etag"] or ""
                left = int(answer.headers["content-length"] or 0)
                begin = into.tell()
                for piece in self._pieces(answer):
                    with file_access("write", into.name):
                        into.write(piece)
                        into.flush()
                if into.tell() - begin < left or not left:
                    raise HubAway(f"{path} broke off")
                return int(answer.headers["x-version"]), answer.headers["x-part"] == "change"

        while (came := self.persist(attempt, math.inf)) is None:
            pass
        return came

    def _pieces(self, file: Any) -> Iterator[bytes]:
        """Yield the bytes of a file, and note that some come: a large one may take hours."""
        while piece := file.read(PIECE):
            self.heard = time.monotonic()
            yield piece

    def _json(self, method: str, path: str, message: Any = None) -> dict[str, Any]:
        body = None if message is None else json.dumps(message).encode()
        with self._answer(method, path, body, {"content-type": "application/json"}) as answer:
            if isinstance(found := json.loads(answer.read()), dict):
                return found
        raise HubAway(f"{path}: the answer is not an object")

    @contextlib.contextmanager
    def _answer(
        self,
        method: str,
        path: str,
        body: Any = None,
        headers: Mapping[str, str] | None = None,
        seconds: float = PATIENCE,
    ) -> Iterator[Any]:
        request = urllib.request.Request(
            self.url + path,
            data=body,
            headers={**(headers or {}), "authorization": f"Bearer {self._token}"},
            method=method,
        )
        try:
            with urllib.request.urlopen(request, timeout=seconds) as answer:
                yield answer
        except urllib.error.HTTPError as error:
            raise self._refusal(error) from None
        # URLError, timeouts and lost connections are all OSErrors.
        except (OSError, http.client.HTTPException, json.JSONDecodeError, UnicodeError) as error:
            raise HubAway(one_line(error)) from None

    def _refusal(self, error: urllib.error.HTTPError) -> Exception:
        try:
            answer = dict(json.loads(error.read(1 << 16)))
            problem = str.strip(answer.pop("error"))  # a TypeError if another server says more
        except (OSError, http.client.HTTPException, LookupError, TypeError, ValueError):
            problem = f"--island {self.url}: status {error.code}, which is no hub's"
            answer = {}
            if error.code >= HTTPStatus.INTERNAL_SERVER_ERROR:
                return HubAway(problem)
        return Refusal(error.code, problem, answer.pop("remedy", ""), **answer)


class Came(NamedTuple):
    """A version of a fragment that has come, in a form. ``refusal`` says why the hub did not want
    the report, which is then lost."""

    version: int
    form: str
    refusal: str = ""


def exchange(
    hub: Hub,
    fragment: int,
    base: int | None,
    path: str | None,
    body: IO[bytes],
    put: Callable[[Hub, str, IO[bytes]], None] | None = None,
) -> Came | None:
    """Put a body at ``path``, a report from version ``base`` or first weights, and take the version
    of the fragment that follows into the same file. Without a path the newest is all that is asked
    for. A report to a secure sum has its own way to ``put`` it. Return None if the run has ended
    before. Raises ``UserError``."""
    refusal = ""
    try:
        if path is not None and put is not None:
            put(hub, path, body)
        elif path is not None:
            hub.persist(partial(hub.put, path, body), math.inf)
            if base is None:
                return Came(0, OWN)
    except Refusal as refused:
        if refused.status == HTTPStatus.UNPROCESSABLE_ENTITY and base is not None:
            base = None
            refusal = str(refused)
        elif "ended" in refused.more:
            return None
        elif "version" not in refused.more:  # it has counted this before, or others' weights
            raise
    try:
        version, is_change = hub.take(fragment, base, body)
    except Refusal as refused:
        if "ended" in refused.more:
            return None
        raise
    return Came(version, CHANGE if is_change else WEIGHTS, refusal)


def begun(work: Callable[[], T]) -> Future[T]:
    """Begin work on a thread of its own, for which the end of this process does not wait."""
    future = Future[T]()

    def run() -> None:
        try:
            future.set_result(work())
        except Exception as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


class Heartbeat:
    """A thread that tells the hub how far the run is, and hears what it wants of this island."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._progress = Progress(step=0, tokens=0)
        self._is_over = threading.Event()
        self.ended = False
        self.evaluates = True
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    def tell(self, progress: Progress) -> None:
        """Set what the next heartbeats say."""
        self._progress = progress

    def leave(self) -> None:
        """Say that the island leaves; return within seconds, heard or not."""
        self._is_over.set()
        self._thread.join(SECONDS_TO_LEAVE)

    def _run(self) -> None:
        leaving = None
        while not leaving:
            leaving = leaving is not None and self._is_over.wait(HEARTBEAT_SECONDS)
            with contextlib.suppress(HubAway, Refusal):
                answer = self._hub.progress(replace(self._progress, leaving=leaving))
                self.ended = bool(answer["ended"])
                self.evaluates = bool(answer["evaluate"])
