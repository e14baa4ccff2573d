"""The command ``shardmlx.chat`` on every rank: prepare, then talk with the user at rank 0."""

from __future__ import annotations

from dataclasses import replace

from shardmlx.common.environment import Blas
from shardmlx.common.reporter import Reporter
from shardmlx.config.inference import ChatConfig
from shardmlx.distributed.transport import Transport
from shardmlx.errors import UserError
from shardmlx.inference.chat_input import PipedLines, TerminalLines, find_terminal
from shardmlx.inference.detokenize import IncrementalDetokenizer
from shardmlx.inference.plan import GenerationLoad
from shardmlx.inference.prompts import ChatMessage, PromptReader
from shardmlx.inference.setup import (
    InferenceRun,
    new_detokenizer,
    prepare,
    report_memory,
    sampling_params_of,
    typical_load,
)

PROMPT = ">> "


def run(config: ChatConfig, transport: Transport, blas: Blas) -> None:
    """Hold the conversation that ``config`` describes. All ranks must call it; raises as
    ``prepare``."""
    reporter = Reporter(quiet=transport.rank != 0 or not config.verbose)
    reporter.say(str(blas))

    def read(reader: PromptReader, most_positions: int | None) -> GenerationLoad:
        if not reader.has_template:
            raise UserError(f"--model {config.model} has no chat template", "use shardmlx generate")
        return typical_load(config, 1, config.cache_tokens, most_positions)

    prepared = prepare(config, transport, reporter, read)
    if prepared.reader is None:
        prepared.later_stage().run()
    else:
        _Chat(config, prepared, prepared.reader, reporter).hold()
    report_memory(prepared, reporter)


class _Chat:
    """A conversation at rank 0, whose KV cache is kept from turn to turn."""

    def __init__(
        self, config: ChatConfig, prepared: InferenceRun, reader: PromptReader, reporter: Reporter
    ) -> None:
        self._config = config
        self._reader = replace(reader, system_prompt=config.system_prompt)
        self._reporter = reporter
        self._most = prepared.plan.load.context
        self._max_tokens = prepared.plan.load.answer
        self._first_stage = prepared.first_stage(keeps_prefixes=True)
        self._lines = _lines(config)
        self._messages: list[ChatMessage] = []
        self._turns = 0

    def hold(self) -> None:
        """Talk until the user leaves, or stdin ends."""
        try:
            self._talk()
        finally:
            self._lines.close()
        self._first_stage.stop()

    def _talk(self) -> None:
        self._reporter.say(self._lines.help)
        while (line := self._ask()) is not None:
            match line.strip():
                case "":
                    pass
                case "q":
                    break
                case "r":
                    self._messages.clear()
                    self._reporter.say("A new conversation.")
                case "h":
                    self._reporter.say(self._lines.help)
                case said:
                    self._turn(said)

    def _ask(self) -> str | None:
        """Return the next line that is typed; None at the end."""
        line = self._lines.ask(self._first_stage.keep_alive)
        if line is None and self._config.verbose:
            print(flush=True)
        return line

    def _turn(self, said: str) -> None:
        message = {"role": "user", "content": said}
        try:
            tokens = self._reader.chat([*self._messages, message])
        except UserError as error:
            self._reporter.warn(str(error))
            return
        context = len(tokens) + self._max_tokens
        if context > self._most:
            self._reporter.warn(
                f"the conversation has {len(tokens)} tokens, and with --max-tokens "
                f"{self._max_tokens} more it does not fit into {self._most} (see "
                "--cache-tokens): r begins anew"
            )
            return
        answer, cached = self._answer(tokens, context)
        self._messages += [message, {"role": "assistant", "content": answer.text}]
        rate = answer.count / max(answer.last - answer.first, 1e-9) if answer.count > 1 else 0.0
        self._reporter.say(
            self._lines.dimmed(
                f"[{len(tokens) - cached} of {len(tokens)} prompt tokens computed, {answer.count} "
                f"generated, {rate:.1f} tokens-per-sec]"
            )
        )

    def _answer(self, tokens: tuple[int, ...], context: int) -> tuple[IncrementalDetokenizer, int]:
        """Print the answer to a prompt as it comes; return it, and how many tokens of the prompt
        came from the prefix cache."""
        number, self._turns = self._turns, self._turns + 1
        tokenizer = self._reader.tokenizer
        answer, cached = new_detokenizer(tokenizer, self._max_tokens), 0
        self._first_stage.add(
            number, tokens, sampling_params_of(self._config, tokenizer, number), context
        )
        is_stopped = False
        try:
            while not self._first_stage.is_idle:
                for _, sampled in self._first_stage.step():
                    segment = answer.take(sampled.token)
                    cached = self._first_stage.cached(number)
                    if answer.finish_reason is not None:
                        self._first_stage.finish(number)
                    self._lines.show(segment)
                has_ended = is_stopped or answer.finish_reason is not None
                if not has_ended and self._lines.interrupts():
                    self._first_stage.cancel(number)
                    is_stopped = True
        finally:
            print(flush=True)  # so that an error begins a line
        return answer, cached


def _lines(config: ChatConfig) -> TerminalLines | PipedLines:
    """Return what is typed: at a terminal where that is possible, and else line by line."""
    if not config.verbose:
        return PipedLines()
    terminal = find_terminal()
    return PipedLines(prompt=PROMPT) if terminal is None else TerminalLines(terminal, PROMPT)
