"""The command ``shardmlx.serve`` on every rank: prepare, and answer requests on rank 0."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from socket import socket
from typing import TYPE_CHECKING

from shardmlx.common.durable_files import DirectoryLock
from shardmlx.common.environment import Blas
from shardmlx.common.http_listener import bind_both
from shardmlx.common.reporter import Reporter
from shardmlx.config.serve import ServeConfig
from shardmlx.distributed.crew import Crew
from shardmlx.distributed.transport import Transport
from shardmlx.errors import UserError, file_access
from shardmlx.inference.prefix_cache import KeptPrefix
from shardmlx.inference.prefix_files import place_of
from shardmlx.inference.prompts import PromptEncoder
from shardmlx.inference.setup import later_stages, prepare, run_inference, typical_load
from shardmlx.inference.worker import InferenceWorker
from shardmlx.planning.facts.job_facts import GenerationLoad
from shardmlx.server.loop_server import run_loop
from shardmlx.server.shared_grammars import share_grammars

if TYPE_CHECKING:
    from shardmlx.server.request_queue import RequestQueue

PATIENCE = 2
"""Chunks of prompts that may come between two decode steps of the sequences under way."""

SECONDS_OF_SILENCE = 30.0
"""Seconds after which a silent rank is lost: clients wait for it."""


def run(config: ServeConfig, transport: Transport, blas: Blas) -> None:
    """Serve until a signal stops it. On all ranks; raises as ``lead``, and ``Stopped`` if its
    terminal was closed."""
    reporter = Reporter(quiet=transport.rank != 0)
    if config.train:
        run_loop(config, transport, reporter, blas)
        return
    with ExitStack() as stack:
        run_inference(transport, reporter, partial(_serve, config, blas, stack))


def _serve(config: ServeConfig, blas: Blas, stack: ExitStack, crew: Crew[InferenceWorker]) -> None:
    """Serve, on rank 0; the ``stack`` closes what is held while it serves."""
    reporter = crew.worker.reporter
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

    prepare(config, crew, read)
    run = crew.worker.run
    grammars = share_grammars(crew, run.prompts, run.shape.vocab_size)
    prefixes: list[KeptPrefix] = []
    if config.prefix_cache_dir is not None:
        place = _open_prefix_files(crew, config.prefix_cache_dir)
        stack.callback(_locked(place).release)
        prefixes = _find_prefixes(crew, place)
    crew.all(InferenceWorker.limit_silence, SECONDS_OF_SILENCE)
    from shardmlx.server.generator import PipelineGenerator, RequestServer

    prepared = crew.worker.run
    with later_stages(crew):
        first_stage = prepared.first_stage(PATIENCE)
        if prefixes:
            first_stage.restore(prefixes)
            reporter.say(f"Prefix cache: {first_stage.kept_tokens} tokens read from the disk")
        server = RequestServer(
            config,
            crew.transport,
            reporter,
            prepared.prompts,
            prepared.sampling,
            prepared.generation.load.context,
            None if grammars is None else grammars.complaint,
        )

        def generate(queue: RequestQueue, check_signals: Callable[[], None]) -> None:
            queue.run(PipelineGenerator(prepared.prompts.tokenizer, first_stage, check_signals))

        server.run(listeners, generate)
        first_stage.stop()
    server.end()


def _open_prefix_files(crew: Crew[InferenceWorker], directory: str) -> Path:
    """Let all ranks keep prefixes in files of this model; return their directory. Raises
    ``UserError``."""
    job = crew.worker.run.job
    setup = job.generated.setup
    settings = job.model, setup.max_kv_size, str(setup.quantisation), job.shares.weights
    place = place_of(directory, crew.all(InferenceWorker.content), settings)
    crew.all(InferenceWorker.open_prefix_files, place)
    return place


def _locked(directory: Path) -> DirectoryLock:
    """Keep other servers out of the directory of kept prefixes. Raises ``UserError``."""
    problem = f"--prefix-cache-dir: another server of this model writes to {directory}"
    refusal = UserError(problem, "end it, or name another directory")
    with file_access("write", directory):
        return DirectoryLock(directory, refusal)


def _find_prefixes(crew: Crew[InferenceWorker], place: Path) -> list[KeptPrefix]:
    """Return the sequences that an earlier server kept and all ranks can read; name the others."""
    files = crew.worker.run.prefix_files
    assert files is not None, "they were opened"
    index = files.read_index()
    faults: dict[str, str] = {}
    of_ranks = crew.all(InferenceWorker.prefix_faults, [each.key for each in index])
    for rank, mine in enumerate(of_ranks):
        faults |= {key: f"{crew.transport.name(rank)}: {fault}" for key, fault in mine.items()}
    for fault in faults.values():
        crew.worker.reporter.warn(f"--prefix-cache-dir {place}: a sequence is passed over: {fault}")
    return [each for each in index if each.key not in faults]
