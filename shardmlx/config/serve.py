"""The options of ``shardmlx.serve``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from shardmlx.config import common_options as common
from shardmlx.config.command_line import CommandLine
from shardmlx.config.inference import (
    MODEL,
    PIPELINED_CHUNK,
    REFUSED,
    SHOWN,
    InferenceConfig,
    most_tokens,
)
from shardmlx.config.loop import GROUP as LOOP
from shardmlx.config.loop import LoopOptions, LoopSpec
from shardmlx.config.options import declared, in_group, refuse, section, split_names
from shardmlx.errors import UserError
from shardmlx.models.sizes.kv_cache import held

_SERVER = "server"

_PACKAGES = ("starlette", "uvicorn", "pydantic")
"""The packages of the ``serve`` extra."""

_PACKAGES_OF_TRAINING = ("tinker", "zstandard")
"""The packages of the ``train-api`` extra beside these."""

_REFUSED = {
    **REFUSED,
    "--log-level": "give --access-log for a line of each request",
    "--chat-template": "write it into the model's chat_template.jinja",
    "--decode-concurrency": "give --batch-size, for prompts and answers together",
    "--prompt-concurrency": "give --batch-size, for prompts and answers together",
    "--prompt-cache-size": "give --cache-tokens: KV caches are counted in tokens",
    "--prompt-cache-bytes": "give --cache-tokens: KV caches are counted in tokens",
}
"""Options of mlx_lm.server that are not here, and why."""

KEY_VARIABLE = "SHARDMLX_API_KEY"
"""The environment variable that may hold the key, which a command line shows to all."""

MOST_BODIES = 8
"""Bodies of --max-body that may wait to be read."""

FACTOR_OF_READING = 20
"""Bytes that a process takes for each of a body that it reads. Measured: 18."""

MOST_ROWS_HELD = 32
"""Bodies of --max-body whose rows may wait to be trained."""

_NOT_WHILE_TRAINING = {
    "adapter_path": "load it as a saved state, or fuse it into the model",
    "draft": "leave it out: answers are drafted by no other model while LoRAs train",
    "kv_bits": "leave it out: KV caches of answers are whole while LoRAs train",
    "max_kv_size": "leave it out: KV caches of answers are whole while LoRAs train",
    "prefill_step_size": "leave it out: prompts come in chunks of --train's own",
    "prefix_cache_dir": "leave it out: a LoRA that trains makes kept prefixes useless",
    "expert_parallel": "leave it out: the layers of a stage stay whole, or are cut",
}
"""Options that do nothing with --train, and what to do instead."""


_server = in_group(_SERVER)
_loop = in_group(LOOP)


@dataclass(frozen=True, kw_only=True)
class ServeConfig(InferenceConfig):
    """The model to serve, the address, and the limits. Raises ``OptionError``, a ``UserError``."""

    max_tokens: int = most_tokens(512, "tokens of an answer at most, where a request says nothing")
    host: str = _server(
        "127.0.0.1", "address to listen at; 0.0.0.0 lets other machines in", metavar="ADDRESS"
    )
    port: int = common.port(8080, group=_SERVER)
    served_model_name: Sequence[str] = _server(
        [],
        "names of the model in requests; answers have the first",
        metavar="NAME",
        parse=str.split,
        unset="the repository's, or that of its directory",
    )
    any_model_name: bool = _server(False, "answer requests for a model of any name")
    api_key: str | None = _server(
        None,
        f"bearer token of requests; in ${KEY_VARIABLE} other users of this machine do not see it",
        metavar="KEY",
        unset=f"${KEY_VARIABLE}, if it is set",
    )
    allow_origin: str | None = _server(
        None,
        "web sites that may ask, like https://example.org, with commas between; * for all",
        metavar="ORIGIN",
        also=("--allowed-origins",),
    )
    allow_host: str | None = _server(
        None, "names of this server that a proxy passes on, with commas between", metavar="HOST"
    )
    cache_tokens: int = _server(
        16384,
        "tokens in the KV caches of all requests together, and in one of them at most",
        metavar="TOKENS",
        minimum=256,
    )
    prefix_cache: bool = _server(
        True, "keep KV caches of answers, for prompts that begin like them"
    )
    prefix_cache_dir: str | None = _server(
        None, "directory, on each machine, that keeps them for the next start", metavar="DIR"
    )
    max_queue: int = _server(64, "requests that may wait", metavar="REQUESTS", minimum=0)
    max_body: int = _server(4_000_000, "size of a request at most", metavar="BYTES", minimum=1000)
    grace: float = _server(
        30.0, "time for open requests when the server stops", metavar="SECONDS", minimum=0
    )
    access_log: bool = _server(False, "print a line for each request")
    train: bool = _server(False, "train LoRAs for programs with Tinker's SDK, at the same address")
    loop: LoopOptions = section(
        LoopOptions,
        state_dir=_loop("states", "directory on rank 0 for saved states", metavar="DIR"),
    )

    @classmethod
    def settled(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Return flat values; spaces divide names, and a cache holds whole pieces."""
        return {
            **super().settled(values),
            "served_model_name": " ".join(values["served_model_name"]).split(),
            "cache_tokens": held(values["cache_tokens"]),
        }

    def __post_init__(self) -> None:
        super().__post_init__()
        unused = self.prefix_cache_dir is not None and not self.prefix_cache
        refuse("prefix_cache_dir", "needs --prefix-cache", "leave one of them out", when=unused)
        # Browsers send scheme and host: with a path, or without a scheme, none would match.
        sites = [each for each in split_names(self.allow_origin) if each not in ("*", "null")]
        are_origins = all(re.fullmatch(r"[\w+.-]+://[^/*\s]+", each) for each in sites)
        remedy = "give origins like https://example.org, without a path"
        refuse("allow_origin", f"is {self.allow_origin}", remedy, when=not are_origins)
        names = split_names(self.allow_host)  # IPv6 has colons
        are_names = all(re.fullmatch(r"[\w.-]+|[\w.]*(:[\w.]*){2,}", each) for each in names)
        remedy = "give names like example.org, without a scheme, port or path"
        refuse("allow_host", f"is {self.allow_host}", remedy, when=not are_names)
        is_key = self.api_key is None or (self.api_key.isascii() and self.api_key.strip())
        refuse("api_key", "is empty or not ASCII", "give letters and digits", when=not is_key)
        self._check_training()

    def _check_training(self) -> None:
        """Raise ``OptionError`` if an option does nothing with --train, or nothing without."""
        usual = {each.name: each.usual for each in declared(ServeConfig)}
        if not self.train:
            for each in declared(LoopOptions):
                is_given = getattr(self.loop, each.name) != usual[each.name]
                refuse(each.name, "needs --train", "add it, or leave this one out", when=is_given)
            return
        for name, remedy in _NOT_WHILE_TRAINING.items():
            value = getattr(self, name)
            refuse(name, f"is {value}, with --train", remedy, when=value != usual[name])

    @property
    def bytes_for_requests(self) -> int:
        """The bytes that rank 0 takes to read what clients send."""
        of_one_api = MOST_BODIES + FACTOR_OF_READING
        of_training = of_one_api + MOST_ROWS_HELD if self.train else 0
        return (of_one_api + of_training) * self.max_body

    @property
    def loop_spec(self) -> LoopSpec:
        """The training loop of clients, as far as its plan depends on it."""
        return LoopSpec(answers=self, loop=self.loop, cache_tokens=self.cache_tokens)

    def chunk(self, ranks: int, backend: str) -> int:
        """Tokens of a prompt that a stage computes at a time: few, where training waits for it."""
        return PIPELINED_CHUNK if self.train else super().chunk(ranks, backend)


def check_packages(config: object) -> None:
    """Raise ``UserError`` unless all packages of the ``serve`` extra are installed, and those of
    ``train-api`` for --train."""
    missing = [name for name in _PACKAGES if find_spec(name) is None]
    if missing:
        problem = f"an HTTP server needs {', '.join(missing)}"
        raise UserError(problem, "pip install 'shardmlx[serve]'")
    if not getattr(config, "train", False):
        return
    missing = [name for name in _PACKAGES_OF_TRAINING if find_spec(name) is None]
    if missing:
        problem = f"--train needs {', '.join(missing)}"
        raise UserError(problem, "pip install 'shardmlx[train-api]'")


LINE = CommandLine(
    options=ServeConfig,
    command="serve",
    description="Serve a model with OpenAI's API and a chat page, through one MPI rank a stage. "
    "With --train Tinker's API trains LoRAs of it, for a loop of your own.",
    groups=(MODEL, _SERVER, LOOP),
    shown=(
        *SHOWN,
        "host",
        "port",
        "api_key",
        "cache_tokens",
        "batch_size",
        "train",
    ),
    refused=_REFUSED,
    check=check_packages,
)
