"""The command ``shardmlx hub``: HTTP on a thread of its own, outer steps on the main one."""

from __future__ import annotations

import shlex
import signal
import ssl
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from shardmlx.common.http_listener import address_of, bind_both
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
    listeners = bind_both(options.host, options.port)
    address = address_of(listeners[0], secure=options.certificate is not None)
    server = HttpServer(
        make_app(rounds, address),
        *listeners,
        no_http={"error": "this is not an HTTP request", "remedy": "see whether it needs https"},
        certificate=options.certificate,
        most_connections=MOST_CONNECTIONS,
        on_end=ends.append,
    )
    server.start()
    tokens = rounds.run.directory / "tokens"
    print(f"The hub's page: {address}; the tokens of islands: {tokens}", flush=True)
    if missing := rounds.run.tokens.keys() - rounds.run.lives.keys():
        print("To join, on a machine of each island, with your options of train:")
        for name in sorted(missing):
            print(f"  {_join_line(rounds, name, address)}", flush=True)
    try:
        _close_rounds(rounds, ends)
    finally:
        server.stop(SECONDS_TO_LOOK)
    raise RuntimeError(f"the HTTP server ended: {ends[0] and one_line(ends[0])}")


def _join_line(rounds: Rounds, name: str, address: str) -> str:
    """Return the command by which an island joins: with its token in a terminal alone, for a log
    may have other readers."""
    token = rounds.run.tokens[name]
    if not sys.stdout.isatty():
        token = f'"$(cat {shlex.quote(str(rounds.run.directory / "tokens" / name))})"'
    return (
        f"SHARDMLX_ISLAND_TOKEN={token} shardmlx train --config lora.yaml --island {address} "
        f"--name {name}"
    )


def _close_rounds(rounds: Rounds, ends: Sequence[object]) -> None:
    """Make the outer steps of a run as long as the server lives."""
    version = rounds.version
    has_ended = rounds.ended
    joined = set(rounds.run.lives)
    while not ends:
        rounds.wait(SECONDS_TO_LOOK)
        try:
            rounds.close_due()
        except OSError as error:
            print(f"shardmlx: no outer step: {one_line(error)}: trying again", file=sys.stderr)
            time.sleep(SECONDS_TO_RETRY)
        for name in sorted(rounds.run.lives.keys() - joined):
            joined.add(name)
            print(f"{name} has joined", flush=True)
        if rounds.version != version:
            version = rounds.version
            print(
                f"Round {version}: {rounds.tokens} tokens, islands: {len(rounds.present())}",
                flush=True,
            )
        if rounds.ended and not has_ended:
            has_ended = True
            print("The run has ended: islands stop, and --write OUT writes the weights", flush=True)
