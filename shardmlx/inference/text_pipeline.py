"""A model divided among the ranks, ready to generate: the Python API's view of inference."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Any

from shardmlx.common.reporter import Reporter
from shardmlx.config.inference import InferenceConfig
from shardmlx.distributed.crew import Crew, lead, leading
from shardmlx.distributed.transport import Transport
from shardmlx.errors import UserError
from shardmlx.inference.prompts import ChatMessage, PromptEncoder
from shardmlx.inference.setup import prepare, typical_load
from shardmlx.inference.worker import InferenceWorker
from shardmlx.models.sizes.kv_cache import held
from shardmlx.planning.facts.job_facts import GenerationLoad

CONTEXT_TOKENS = 4096
"""Tokens of a prompt and its answer that are planned for, unless the caller says otherwise."""


class TextPipeline:
    """A model whose stages the ranks hold. ``load_pipeline`` makes it; all ranks have one."""

    def __init__(self, worker: InferenceWorker) -> None:
        self._worker = worker
        self._number = 0

    def stream_generate(
        self, prompt: str | Sequence[ChatMessage], *, max_tokens: int | None = None
    ) -> Iterator[str]:
        """Generate the answer to a prompt; yield it as it comes on rank 0, and nothing elsewhere.

        A text goes through the model's chat template, if there is one, as a user's message; a
        sequence of messages is a chat. All ranks must call it and iterate over it; rank 0's prompt
        counts, and rank 0 may leave the loop early. Raises ``AgreedError`` on all ranks where the
        prompt cannot be used, and ``EngineError`` or ``TransportError`` where a rank fails.
        """
        transport, self._number = self._worker.transport, self._number + 1
        most = self._worker.run.generation.load.answer if max_tokens is None else max_tokens
        with leading(transport, self._worker) as crew:
            if crew is not None:
                tokens = self._read(prompt, most)
                with crew.others(InferenceWorker.follow):
                    yield from self._generate(tokens, most)

    def generate(
        self, prompt: str | Sequence[ChatMessage], *, max_tokens: int | None = None
    ) -> str:
        """Return the whole answer on rank 0, else ""; all else is as in ``stream_generate``."""
        return "".join(self.stream_generate(prompt, max_tokens=max_tokens))

    def _read(self, prompt: str | Sequence[ChatMessage], max_tokens: int) -> tuple[int, ...]:
        run = self._worker.run
        most = run.generation.load.context
        tokens = run.prompts.encode(prompt)
        if max_tokens < 1:
            raise UserError(f"max_tokens is {max_tokens}", "give 1 or more")
        if len(tokens) + max_tokens > most:
            raise UserError(
                f"a prompt of {len(tokens)} tokens and max_tokens {max_tokens} are more than "
                f"{most}",
                "give less, or a larger context_tokens to load_pipeline",
            )
        return tokens

    def _generate(self, tokens: Sequence[int], max_tokens: int) -> Iterator[str]:
        number, first_stage = self._number, self._worker.run.first_stage()
        answer = self._worker.run.ask(first_stage, number, tokens, max_tokens)
        try:
            for _, text in first_stage.stream({number: answer}):
                if text:
                    yield text
        except GeneratorExit:  # the caller has heard enough
            if answer.finish_reason is None:
                first_stage.cancel(number)
            while not first_stage.is_idle:
                first_stage.step()
            first_stage.stop()
            raise
        first_stage.stop()


def load_pipeline(
    model: str, transport: Transport, *, context_tokens: int = CONTEXT_TOKENS, **options: Any
) -> TextPipeline:
    """Load each rank's stage of a model, to generate text. All ranks must call it.

    ``model`` is a directory or a Hugging Face repository, which only rank 0 needs.
    ``context_tokens`` bounds a prompt with its answer. ``options`` are those of
    ``shardmlx.generate``: ``adapter_path``, ``max_tokens``, ``temp`` ... Raises ``AgreedError`` on
    all ranks, before weights are read, where the model does not fit or an option is wrong.
    """
    capacity = held(context_tokens)

    def load(crew: Crew[InferenceWorker]) -> None:
        config = InferenceConfig.from_flat(model=model, **options)

        def read(encoder: PromptEncoder) -> GenerationLoad:
            return typical_load(config, 1, capacity, encoder)

        prepare(config, crew, read)

    with closing(InferenceWorker(transport, Reporter(quiet=True))) as worker:
        lead(transport, worker, load)
    return TextPipeline(worker)
