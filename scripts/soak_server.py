#!/usr/bin/env python3
"""Send a server mixed requests, of which some clients leave early, and watch its memory.

    python scripts/soak_server.py

It serves a tiny model on two ranks, and has eight clients ask at a time, in turn each of the
kinds below. Every answer must have its status; the resident memory of all ranks is printed now and
then. It fails where an answer has another status, where a text goes on whose client has left, or
where memory grows by more than ``--most`` bytes a request in the second half: by then MLX keeps
free buffers of most sizes that it needs. Linux only.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import httpx
from _soaking import small_model

from testbed.jobs import Running

CLIENTS = 8
RANKS = 2
SECONDS = 120.0
DAY = {"type": "object", "properties": {"day": {"enum": ["mon", "tue"]}}, "required": ["day"]}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "day", "schema": DAY}}


class Kind(NamedTuple):
    """A kind of request; its client may leave after the first event of the answer."""

    path: str
    body: Mapping[str, Any]
    status: int = 200
    leaves: bool = False


CHAT, COMPLETE = "/v1/chat/completions", "/v1/completions"
KINDS: Mapping[str, Kind] = MappingProxyType(
    {
        "a chat": Kind(CHAT, {}),
        "a stream": Kind(CHAT, {"stream": True, "temperature": 1, "seed": 3}),
        "a stream, left": Kind(CHAT, {"stream": True, "max_tokens": 200}, leaves=True),
        "two texts": Kind(COMPLETE, {"prompt": ["Ahoy", "The sea"], "logprobs": 2}),
        "a schema": Kind(CHAT, {"response_format": SCHEMA, "temperature": 1, "max_tokens": 60}),
        "Anthropic's": Kind("/v1/messages", {}),
        "Anthropic's stream": Kind("/v1/messages", {"stream": True}),
        "a response": Kind("/v1/responses", {"max_output_tokens": 8}),
        "a response, left": Kind("/v1/responses", {"stream": True}, leaves=True),
        "one refused": Kind(CHAT, {"temperature": 9}, 400),
    }
)


def ask(client: httpx.Client, number: int) -> str:
    """Ask for the answer to request ``number``; return what is wrong with it, or nothing."""
    name = list(KINDS)[number % len(KINDS)]
    kind = KINDS[name]
    said = f"Tell me of ship {number}, and of {'winds ' * (number % 9)}."
    body: dict[str, Any] = {"model": "default"}
    if kind.path == "/v1/responses":
        body["input"] = said
    elif kind.path != COMPLETE:
        body["messages"] = [{"role": "user", "content": said}]
    if kind.path != "/v1/responses":
        body["max_tokens"] = 8
    with client.stream("POST", kind.path, json=body | dict(kind.body)) as answer:
        if kind.leaves:
            next(answer.iter_lines())
        else:
            answer.read()
    return "" if answer.status_code == kind.status else f"{name}: {answer.status_code}"


def address_of(server: Running) -> str:
    """Return the address of a server once it answers."""
    address = r"^Serving .* at (http://\S+)"
    server.until(lambda: re.search(address, server.job().stdout, re.M) is not None, SECONDS)
    found = re.search(address, server.job().stdout, re.M)
    assert found is not None
    return found[1]


def resident(server: Running, rank: int) -> int:
    """Return the bytes of a rank that are in memory."""
    status = Path(f"/proc/{server.pid_of(rank)}/status").read_text()
    found = re.search(r"^VmRSS:\s+(\d+) kB", status, re.M)
    assert found is not None
    return int(found[1]) << 10


def rest(client: httpx.Client) -> None:
    """Return once no text is generated any more."""
    end = time.monotonic() + SECONDS
    while not re.search(r"^shardmlx_texts_under_way 0", client.get("/metrics").text, re.M):
        if time.monotonic() > end:
            sys.exit("texts of clients that have left are still generated")
        time.sleep(0.05)


def soak(server: Running, requests: int, every: int) -> list[list[int]]:
    """Send all requests; return the resident bytes of each rank every so many of them."""
    seen: list[list[int]] = []
    with (
        httpx.Client(base_url=address_of(server), timeout=SECONDS) as client,
        ThreadPoolExecutor(CLIENTS) as clients,
    ):
        for start in range(0, requests + 1, every):
            rest(client)
            seen.append([resident(server, rank) for rank in range(RANKS)])
            print(start, *(f"{each / 2**20:.1f} MiB" for each in seen[-1]), flush=True)
            numbers = range(start, min(start + every, requests))
            faults = list(filter(None, clients.map(partial(ask, client), numbers)))
            if faults:
                sys.exit("\n".join(faults))
    return seen


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--requests", type=int, default=2000, help="to send (default: 2000)")
    parser.add_argument("--every", type=int, default=250, help="look so often (default: 250)")
    parser.add_argument(
        "--most",
        type=int,
        default=4096,
        help="bytes a request to grow at most (default: 4096)",
    )
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        model, _ = small_model(Path(directory))
        options = "--model", model, "--port", "0"
        with Running.ranks(RANKS, "-m", "shardmlx.serve", *options) as server:
            seen = soak(server, flags.requests, flags.every)
    middle = len(seen) // 2
    count = max(1, (len(seen) - 1 - middle) * flags.every)
    grown = [(seen[-1][rank] - seen[middle][rank]) / count for rank in range(RANKS)]
    print(f"bytes a request in the second half: {', '.join(f'{each:.0f}' for each in grown)}")
    return 1 if max(grown) > flags.most else 0


if __name__ == "__main__":
    raise SystemExit(main())
