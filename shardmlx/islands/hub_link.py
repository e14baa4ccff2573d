"""Talk to the hub for an island, on rank 0: by a heartbeat, and a thread for each fragment that is
under way.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from tempfile import NamedTemporaryFile
from typing import IO, Any

from shardmlx.common.formatting import plural
from shardmlx.common.reporter import Reporter
from shardmlx.config.train import TrainConfig
from shardmlx.errors import one_line
from shardmlx.islands.client import PATIENCE, Came, Heartbeat, Hub, begun, exchange
from shardmlx.islands.protocol import Join, Joined, Progress, SharedTensor, check_secure_sums

SECONDS_TO_LOOK = 0.02
"""Seconds between two looks at what is awaited."""


@dataclass(frozen=True, slots=True)
class _Asked:
    """A version of a fragment that was asked for: it comes into the file ``body``, from which the
    report goes before it."""

    body: IO[bytes]
    coming: Future[Came | None]


class HubLink:
    """An island's link to the hub that it has joined, with trained ``tensors``. ``ended`` and
    ``evaluates`` are what the hub wanted of it when it was last heard."""

    def __init__(self, hub: Hub, joined: Joined, tensors: tuple[SharedTensor, ...]) -> None:
        self.joined = joined
        self.tensors = tensors
        self.ended = False
        self.evaluates = True
        self._hub = hub
        self._heartbeat: Heartbeat | None = None
        self._asked: dict[int, _Asked] = {}

    @property
    def patience(self) -> float:
        """Seconds of the hub's silence for which ``wait`` waits."""
        return PATIENCE

    @property
    def url(self) -> str:
        """The hub's address."""
        return self._hub.url

    def enter(self) -> None:
        """Be present at the hub until ``leave``."""
        self._heartbeat = Heartbeat(self._hub)

    def tell(self, progress: Progress) -> None:
        """Tell the hub how far the run is, soon."""
        if self._heartbeat is not None:
            self._heartbeat.tell(progress)

    def leave(self) -> None:
        """Leave the hub, if it was entered; what is under way is given up."""
        if self._heartbeat is None:
            return
        self._heartbeat.leave()
        self._hub.closed.set()
        for fragment in [*self._asked]:
            self.forget(fragment)

    def new_body(self) -> IO[bytes]:
        """Return a file that goes away as it is closed: fragments may be large."""
        return NamedTemporaryFile()

    def ask(
        self, fragment: int, base: int | None, path: str | None, body: IO[bytes], rows: int = 0
    ) -> None:
        """Begin to put a body at ``path``, a report of so many rows or first weights, and to take
        the version that follows ``base``, see ``exchange``."""
        put = None
        if self.joined.terms.secure_sums and base is not None:
            from shardmlx.islands.secure_client import report_secretly  # needs cryptography

            put = partial(report_secretly, rows=rows)
        coming = begun(partial(exchange, self._hub, fragment, base, path, body, put))
        self._asked[fragment] = _Asked(body, coming)

    def wait(self, fragments: Iterable[int], goes_on: Callable[[], bool]) -> bool:
        """Wait for versions that were asked for, as long as bytes come or go, and ``patience``
        seconds more, and while ``goes_on``. Return False if the hub was silent for so long."""
        coming = [self._asked[each].coming for each in fragments if each in self._asked]
        start = time.monotonic()
        while wait(coming, SECONDS_TO_LOOK).not_done and goes_on():
            if time.monotonic() > max(start, self._hub.heard) + self.patience:
                return False
        return True

    def hear(self, fragments: Collection[int]) -> tuple[dict[int, Came], str | None]:
        """Return which of these fragments have come, and why the run cannot go on, if it cannot;
        hear what the hub wants of this island."""
        found: dict[int, Came] = {}
        problem: str | None = None
        if self._heartbeat is not None:
            self.ended = self._heartbeat.ended
            self.evaluates = self._heartbeat.evaluates
        for fragment in fragments:
            asked = self._asked.get(fragment)
            if asked is None or not asked.coming.done():
                continue
            if (error := asked.coming.exception()) is not None:
                problem = one_line(error)
            elif (came := asked.coming.result()) is None:
                self.ended = True
            else:
                found[fragment] = came
        return found, problem

    def body(self, fragment: int) -> IO[bytes]:
        """Return the file with the bytes of a version that has come."""
        return self._asked[fragment].body

    def forget(self, fragment: int) -> None:
        """Forget a version that was taken."""
        self._asked.pop(fragment).body.close()


def join(
    config: TrainConfig, model: str, shapes: Mapping[str, tuple[int, ...]], reporter: Reporter
) -> HubLink | None:
    """Join the hub that the options name, with trained weights of these ``shapes`` of the model
    with this digest. On rank 0. Raises ``UserError``."""
    if config.island is None or config.name is None:
        return None
    # All islands have them in one order, whatever their stages are.
    tensors = tuple(SharedTensor(each, shapes[each]) for each in sorted(shapes, key=_place))
    options = config.to_adapter_config()
    kept = ("model", "fine_tune_type", "num_layers", "lora_parameters")
    message = Join(
        name=config.name,
        model={"config": model, **{each: options[each] for each in kept[1::2]}},
        tensors=tensors,
        adapter_config={each: options[each] for each in kept},
    )
    hub = Hub.of(config.island, config.name, reporter.say)
    joined = hub.persist(partial(hub.join, message))
    if joined.terms.secure_sums:
        check_secure_sums(f"--island {config.island}")
    updates = config.updates
    every = joined.terms.inner_steps
    if left := updates % every:
        enough = (updates - left + every) * config.batch.grad_accumulation_steps
        reporter.warn(
            f"--iters {config.iters} makes {plural(updates, 'update')}, and the hub takes "
            f"reports every {every}: the last {left} will stay on this island; --iters {enough} "
            "has them all reported"
        )
    return HubLink(hub, joined, tensors)


def _place(name: str) -> list[Any]:
    return [int(each) if each.isdecimal() else each for each in re.split(r"(\d+)", name)]
