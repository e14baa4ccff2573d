"""Serve with ``--train``, on every rank: OpenAI's API and Tinker's, over ranks that train."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from socket import socket

from shardmlx.api.sampling import SamplingWorker
from shardmlx.api.service import TrainService
from shardmlx.api.setup import prepare, serve_loop
from shardmlx.api.worker import LoopWorker
from shardmlx.common.environment import EARLIER_END, Blas
from shardmlx.common.http_listener import bind_both, trusted_hosts
from shardmlx.common.reporter import Reporter
from shardmlx.config.serve import KEY_VARIABLE, ServeConfig
from shardmlx.distributed.crew import Crew, lead
from shardmlx.distributed.transport import Transport
from shardmlx.errors import UserError
from shardmlx.inference.prompts import PromptEncoder
from shardmlx.inference.run import usual_sampling
from shardmlx.inference.setup import encoder_of
from shardmlx.server.shared_grammars import share_grammars


def run_loop(config: ServeConfig, transport: Transport, reporter: Reporter, blas: Blas) -> None:
    """Serve until a signal stops it. On all ranks; raises as ``lead``, and ``Stopped`` if its
    terminal was closed."""
    with closing(LoopWorker(transport, reporter)) as worker:
        lead(transport, worker, partial(_serve, config, blas))


def _serve(config: ServeConfig, blas: Blas, crew: Crew[LoopWorker]) -> None:
    crew.worker.reporter.say(str(blas))
    listeners = bind_both(config.host, config.port)
    _check_key(config, listeners)
    prepare(config.loop_spec, crew)
    encoder = encoder_of(config, crew.worker.opened)
    service = serve_loop(config.loop_spec, crew, encoder.tokenizer)
    try:
        _answer(config, crew, encoder, service, listeners)
    finally:
        service.end()


def _check_key(config: ServeConfig, listeners: Sequence[socket]) -> None:
    """Raise ``UserError`` if other machines could train without a key."""
    from shardmlx.server.generator import key_of

    if trusted_hosts(listeners[0]) is None and key_of(config) is None:
        problem = f"--train at --host {config.host} without a key: whoever reaches it could train"
        raise UserError(problem, f"set --api-key or ${KEY_VARIABLE}, or leave --host out")


def _answer(
    config: ServeConfig,
    crew: Crew[LoopWorker],
    encoder: PromptEncoder,
    service: TrainService,
    listeners: Sequence[socket],
) -> None:
    from shardmlx.server.generator import RequestServer
    from shardmlx.server.loop_generator import LoopGenerator
    from shardmlx.server.request_queue import RequestQueue
    from shardmlx.server.tinker.app import tinker_routes

    sampler = service.sampler
    assert sampler is not None, "its plan has answers"
    reporter = crew.worker.reporter
    sampling = usual_sampling(config, encoder.tokenizer)
    sampling_crew = crew.part(SamplingWorker, "sampling")
    grammars = share_grammars(sampling_crew, encoder, crew.worker.opened.shape.vocab_size)
    server = RequestServer(
        config,
        crew.transport,
        reporter,
        encoder,
        sampling,
        sampler.context,
        None if grammars is None else grammars.complaint,
        tell_others=service.fail,
    )
    routes = tinker_routes(
        service,
        server.names,
        most_tokens=sampler.context,
        max_body_bytes=config.max_body,
        reporter=reporter,
        earlier_end=os.environ.get(EARLIER_END, ""),
        tokenizer=None if trusted_hosts(listeners[0]) is None else config.source.model,
    )

    def generate(queue: RequestQueue, check_signals: Callable[[], None]) -> None:
        generator = LoopGenerator(sampler, encoder.tokenizer, queue.pass_on)
        queue.on_news = service.wake

        def look() -> None:
            check_signals()
            if not queue.turn(generator):
                service.close(queue.ended or "the server is stopping")

        service.run(look)

    server.run(listeners, generate, routes)
    server.end()
