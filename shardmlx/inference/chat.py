"""The command ``shardmlx.chat`` on every rank: prepare, then talk with the user at rank 0."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from shardmlx.common.environment import Blas
from shardmlx.common.reporter import Reporter
from shardmlx.config.inference import NO_DRAFT, ChatConfig
from shardmlx.distributed.crew import Crew
from shardmlx.distributed.transport import Transport
from shardmlx.errors import UserError
from shardmlx.inference.chat_input import PipedLines, TerminalLines, find_terminal
from shardmlx.inference.detokenize import IncrementalDetokenizer
from shardmlx.inference.drafts import NO_DRAFTS, DraftCounts
from shardmlx.inference.prompts import ChatMessage, PromptEncoder
from shardmlx.inference.run import InferenceRun
from shardmlx.inference.setup import later_stages, prepare, run_inference, typical_load
from shardmlx.inference.worker import InferenceWorker
from shardmlx.planning.facts.job_facts import GenerationLoad

PROMPT = ">> "


def run(config: ChatConfig, transport: Transport, blas: Blas) -> None:
    """Hold the conversation. On all ranks; raises as ``prepare``."""
    reporter = Reporter(quiet=transport.rank != 0 or not config.verbose)
    run_inference(transport, reporter, partial(_hold, config, blas))


def _hold(config: ChatConfig, blas: Blas, crew: Crew[InferenceWorker]) -> None:
    """Hold the conversation, on rank 0."""
    crew.worker.reporter.say(str(blas))

    def read(encoder: PromptEncoder) -> GenerationLoad:
        if not encoder.has_template:
            raise UserError(
                f"--model {config.source.model} has no chat template", "use shardmlx generate"
            )
        return typical_load(config, 1, config.cache_tokens, encoder, keeps_prefixes=True)

    prepared = prepare(config, crew, read)
    with later_stages(crew):
        _Chat(config, prepared).hold()


class _Chat:
    """A conversation at rank 0, whose KV cache is kept from turn to turn."""

    def __init__(self, config: ChatConfig, prepared: InferenceRun) -> None:
        self._config = config
        self._prepared = prepared
        self._encoder = replace(prepared.prompts, system_prompt=config.system_prompt)
        self._say = prepared.reporter.say
        self._load = prepared.generation.load
        self._first_stage = prepared.first_stage()
        self._lines = _lines(config)
        self._messages: list[ChatMessage] = []
        self._turns = 0

    def hold(self) -> None:
        """Talk until the user ends it, and give the terminal back."""
        try:
            self._talk()
        finally:
            self._lines.close()
        self._first_stage.stop()

    def _talk(self) -> None:
        self._say(self._lines.help)
        while (line := self._lines.ask(self._first_stage.keep_alive)) is not None:
            match line.strip():
                case "":
                    pass
                case "q":
                    return
                case "r":
                    self._messages.clear()
                    self._say("A new conversation.")
                case "h":
                    self._say(self._lines.help)
                case said:
                    self._turn(said)
        if self._config.verbose:
            print(flush=True)

    def _turn(self, said: str) -> None:
        message = {"role": "user", "content": said}
        warn, most = self._prepared.reporter.warn, self._load.answer
        try:
            tokens = self._encoder.chat([*self._messages, message])
        except UserError as error:
            warn(str(error))
            return
        if len(tokens) + most > self._load.context:
            warn(
                f"the conversation has {len(tokens)} tokens, and with --max-tokens {most} more it "
                f"does not fit into {self._load.context} (see --cache-tokens): r begins anew"
            )
            return
        answer, cached, drafts = self._answer(tokens)
        self._messages += [message, {"role": "assistant", "content": answer.text}]
        rate = answer.count / max(answer.last - answer.first, 1e-9) if answer.count > 1 else 0.0
        told = "" if self._config.draft == NO_DRAFT else f"; drafts: {drafts}"
        self._say(
            self._lines.dimmed(
                f"[{len(tokens) - cached} of {len(tokens)} prompt tokens computed, {answer.count} "
                f"generated, {rate:.1f} tokens-per-sec{told}]"
            )
        )

    def _answer(self, tokens: tuple[int, ...]) -> tuple[IncrementalDetokenizer, int, DraftCounts]:
        """Print the answer as it comes; return it, how many prompt tokens were cached, and its
        drafts."""
        number, self._turns = self._turns, self._turns + 1
        first_stage, cached, drafts, is_stopped = self._first_stage, 0, NO_DRAFTS, False
        answer = self._prepared.ask(first_stage, number, tokens, self._load.answer)
        try:
            while not first_stage.is_idle:
                for _, sampled in first_stage.step():
                    segment = answer.take(sampled.token)
                    cached, drafts = first_stage.cached(number), first_stage.drafts(number)
                    if answer.finish_reason is not None:
                        first_stage.finish(number)
                    self._lines.show(segment)
                has_ended = is_stopped or answer.finish_reason is not None
                if not has_ended and self._lines.interrupts():
                    first_stage.cancel(number)
                    is_stopped = True
        finally:
            print(flush=True)  # so that an error begins a line
        return answer, cached, drafts


def _lines(config: ChatConfig) -> TerminalLines | PipedLines:
    if not config.verbose:
        return PipedLines()
    terminal = find_terminal()
    return PipedLines(prompt=PROMPT) if terminal is None else TerminalLines(terminal, PROMPT)
