"""A hub in this process: its app on a port, and a thread that makes its outer steps."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardmlx.common.http_listener import address_of, bind
from shardmlx.common.uvicorn_thread import HttpServer
from shardmlx.islands.hub_api import make_app
from shardmlx.islands.hub_options import HubOptions
from shardmlx.islands.rounds import Rounds


@dataclass(frozen=True)
class RunningHub:
    url: str
    rounds: Rounds

    @property
    def tokens(self) -> dict[str, str]:
        return self.rounds.run.tokens


@contextmanager
def running_hub(path: Path, islands: str, port: int = 0, **options: Any) -> Iterator[RunningHub]:
    """A hub for islands with these names, commas between; ended as by a signal."""
    rounds = Rounds(HubOptions.from_flat(path=str(path), islands=islands, **options))
    ends: list[BaseException | None] = []
    listener = bind("127.0.0.1", port)
    server = HttpServer(
        make_app(rounds, address_of(listener)),
        listener,
        no_http={"error": "no HTTP"},
        on_end=ends.append,
    )

    def close_rounds() -> None:
        while not ends:
            rounds.wait(0.05)
            rounds.close_due()

    closer = threading.Thread(target=close_rounds)
    server.start()
    closer.start()
    try:
        yield RunningHub(server.address, rounds)
    finally:
        server.stop(0)
        closer.join()
        rounds.run.close()
    assert ends == [None]
