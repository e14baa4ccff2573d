"""The command ``shardmlx.serve`` on every rank: prepare, and answer requests on rank 0."""

from __future__ import annotations

from dataclasses import replace
from socket import socket

from shardmlx.common.environment import Blas
from shardmlx.common.http_listener import bind_both
from shardmlx.common.reporter import Reporter
from shardmlx.config.inference import HEAD
from shardmlx.config.serve import ServeConfig
from shardmlx.distributed.transport import Transport
from shardmlx.inference.grammars import share_grammars
from shardmlx.inference.plan import GenerationLoad
from shardmlx.inference.prefix_cache import KeptPrefix
from shardmlx.inference.prefix_files import find_kept, open_prefix_files
from shardmlx.inference.prompts import PromptEncoder
from shardmlx.inference.setup import prepare, typical_load

PATIENCE = 2
"""Chunks of prompts that may come between two decode steps of the sequences under way."""

SECONDS_OF_SILENCE = 30.0
"""Seconds after which a silent rank is lost: clients wait for it."""


def run(config: ServeConfig, transport: Transport, blas: Blas) -> None:
    """Serve until a signal stops it. All ranks must call it; raises as ``prepare``."""
    reporter = Reporter(quiet=transport.rank != 0)
    reporter.say(str(blas))
    listeners: list[socket] = []

    def read(encoder: PromptEncoder) -> GenerationLoad:
        load = typical_load(
            config,
            config.batch_size,
            config.cache_tokens,
            encoder,
            keeps_prefixes=config.prefix_cache,
        )
        listeners.extend(bind_both(config.host, config.port))
        return load

    prepared = prepare(config, transport, reporter, read)
    grammars = share_grammars(transport, prepared.encoder, prepared.shape.vocab_size)
    prepared = replace(prepared, grammars=grammars)
    prefixes: list[KeptPrefix] = []
    if config.prefix_cache_dir is not None:
        setup = prepared.plan.setup
        settings = setup.max_kv_size, str(setup.quantisation), prepared.plan.shares.weights
        files = open_prefix_files(transport, config.prefix_cache_dir, prepared.part, settings)
        if prepared.head is not None:
            files = replace(files, layers=(*files.layers, HEAD))
        prepared = replace(prepared, prefix_files=files)
        prefixes = find_kept(transport, files, reporter.warn)
    transport.limit_silence(SECONDS_OF_SILENCE)

    def lead(encoder: PromptEncoder) -> None:
        from shardmlx.server.generator import RequestServer

        first_stage = prepared.first_stage(PATIENCE)
        if prefixes:
            first_stage.restore(prefixes)
            reporter.say(f"Prefix cache: {first_stage.kept_tokens} tokens read from the disk")
        RequestServer(config, prepared, encoder, first_stage).run(listeners)
        first_stage.stop()

    prepared.hold(lead)
