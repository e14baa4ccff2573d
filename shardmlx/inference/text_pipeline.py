"""A model divided among the ranks, ready to generate: the Python API's view of inference."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from shardmlx.common.reporter import Reporter
from shardmlx.config.inference import InferenceConfig
from shardmlx.distributed.agreement import from_rank_0, on_rank_0
from shardmlx.distributed.transport import Transport
from shardmlx.errors import UserError
from shardmlx.inference.plan import GenerationLoad
from shardmlx.inference.prompts import ChatMessage, PromptEncoder
from shardmlx.inference.run import InferenceRun
from shardmlx.inference.setup import prepare, typical_load
from shardmlx.models.kv_cache import held

CONTEXT_TOKENS = 4096
"""Tokens of a prompt and its answer that are planned for, unless the caller says otherwise."""


class TextPipeline:
    """A model whose stages the ranks hold. ``load_pipeline`` makes it; all ranks have one."""

    def __init__(self, prepared: InferenceRun) -> None:
        self._prepared = prepared
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
        prepared, self._number = self._prepared, self._number + 1
        most = prepared.plan.load.answer if max_tokens is None else max_tokens
        tokens = on_rank_0(
            prepared.transport, "reading the prompt", lambda: self._read(prompt, most)
        )
        if tokens is None:
            prepared.later_stage().run()
        else:
            yield from self._generate(tokens, most)

    def generate(
        self, prompt: str | Sequence[ChatMessage], *, max_tokens: int | None = None
    ) -> str:
        """Return the whole answer on rank 0, else ""; all else is as in ``stream_generate``."""
        return "".join(self.stream_generate(prompt, max_tokens=max_tokens))

    def _read(self, prompt: str | Sequence[ChatMessage], max_tokens: int) -> tuple[int, ...]:
        encoder, most = self._prepared.encoder, self._prepared.plan.load.context
        assert encoder is not None, "rank 0 has it"
        tokens = encoder.encode(prompt)
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
        number, first_stage = self._number, self._prepared.first_stage()
        answer = self._prepared.ask(first_stage, number, tokens, max_tokens)
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
    config = from_rank_0(transport, "options", lambda: InferenceConfig(model=model, **options))
    capacity = held(context_tokens)

    def read(encoder: PromptEncoder) -> GenerationLoad:
        return typical_load(config, 1, capacity, encoder)

    return TextPipeline(prepare(config, transport, Reporter(quiet=True), read))
