"""The command ``shardmlx hub``: HTTP on a thread of its own, outer steps on the main one."""

from __future__ import annotations

import signal
import ssl
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from shardmlx.common.http_listener import bind_both
from shardmlx.config.serve import check_packages
from shardmlx.errors import file_access, one_line, refusing
from shardmlx.islands.hub_options import LINE
from shardmlx.islands.rounds import Rounds
from shardmlx.islands.store import Run

MOST_CONNECTIONS = 200
"""Connections at a time, strangers' too: macOS gives a process 256 files."""

SECONDS_TO_LOOK = 0.5
"""Seconds between two looks at the deadlines of rounds; a report is seen at once."""

SECONDS_TO_RETRY = 30.0
"""Seconds until an outer step that the disk refused is tried again."""


def run(words: Sequence[str]) -> int:
    """Run ``shardmlx hub`` until a signal stops it, or write its weights. Raises ``UserError``."""
    options = LINE.load(words)
    if options.write is not None:
        refused = file_access("write --write", options.write, "name another directory")
        with refused, closing(Run(Path(options.path), [], None)) as whole:
            whole.export(Path(options.write))
        print(f"{options.write}: the outer weights, as adapters")
        return 0
    check_packages(options)

    from shardmlx.common.uvicorn_thread import HttpServer
    from shardmlx.islands.hub_api import make_app

    with file_access("write to --path", options.path, "name another directory"):
        rounds = Rounds(options)
    if options.certificate is not None:
        remedy = "give a PEM file with certificate and key"
        with refusing(f"--certificate {options.certificate}", remedy):
            ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(options.certificate)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    ends: list[BaseException | None] = []
    server = HttpServer(
        make_app(rounds),
        *bind_both(options.host, options.port),
        no_http={"error": "this is no HTTP request", "remedy": "see whether it needs https"},
        certificate=options.certificate,
        most_connections=MOST_CONNECTIONS,
        on_end=ends.append,
    )
    server.start()
    tokens = rounds.run.directory / "tokens"
    print(f"The hub's page: {server.address}; the tokens of islands: {tokens}", flush=True)
    try:
        _close_rounds(rounds, ends)
    finally:
        server.stop(SECONDS_TO_LOOK)
    raise RuntimeError(f"the HTTP server ended: {ends[0] and one_line(ends[0])}")


def _close_rounds(rounds: Rounds, ends: Sequence[object]) -> None:
    """Make the outer steps of a run as long as the server lives."""
    version, has_ended = rounds.version, rounds.ended
    while not ends:
        rounds.wait(SECONDS_TO_LOOK)
        try:
            rounds.close_due()
        except OSError as error:
            print(f"shardmlx: no outer step: {one_line(error)}: trying again", file=sys.stderr)
            time.sleep(SECONDS_TO_RETRY)
        if rounds.version != version:
            version = rounds.version
            print(
                f"Round {version}: {rounds.tokens} tokens, islands: {len(rounds.present())}",
                flush=True,
            )
        if rounds.ended and not has_ended:
            has_ended = True
            print("The run has ended: islands stop, and --write OUT writes the weights", flush=True)
