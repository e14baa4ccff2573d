"""What ``shardmlx.generate`` does on every rank: prepare, load, generate, and say what it took."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import mlx.core as mx
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import maybe_set_recommended_wired_limit

from shardmlx.agreement import by_rank_0, together
from shardmlx.choice import Choice
from shardmlx.config import TrainConfig
from shardmlx.data import read_tokenizer
from shardmlx.environment import Blas
from shardmlx.errors import UserError
from shardmlx.generate_config import GenerateConfig
from shardmlx.inference import Follower, Leader
from shardmlx.inference_plan import (
    CHOOSE_CACHES,
    InferencePlan,
    Load,
    plan_inference,
    predicted_memory,
)
from shardmlx.loading import build_to_generate, find_model
from shardmlx.model_source import open_model
from shardmlx.models.shape import ModelShape, read_config
from shardmlx.models.slice import Slice
from shardmlx.preparation import SETUP_SECONDS, cluster_of, compare_plans, model_digest
from shardmlx.prompt_reader import PromptReader
from shardmlx.prompts import Request, read_prompts, read_stdin
from shardmlx.report import Bar, Reporter, check_writable
from shardmlx.sampling import random_state
from shardmlx.tables import gigabytes
from shardmlx.token_schedule import Scheduler
from shardmlx.transport import Transport
from shardmlx.workload import Workload

RULE = "=" * 10
"""Around the text, as mlx-lm draws it."""


@dataclass(frozen=True, slots=True)
class Prompts:
    """On rank 0: what to generate, tokenised."""

    tokenizer: TokenizerWrapper
    requests: Sequence[Request]
    tokens: Sequence[Sequence[int]]

    @property
    def load(self) -> Load:
        lengths = list(map(len, self.tokens))
        answers = [request.max_tokens for request in self.requests]
        context = max(a + b for a, b in zip(lengths, answers, strict=True))
        return Load(len(lengths), max(lengths), max(answers), context)


@dataclass(frozen=True, slots=True)
class Prepared:
    """A run that is ready to start. ``prompts`` on rank 0 only."""

    config: GenerateConfig
    transport: Transport
    plan: InferencePlan
    workload: Workload
    part: Slice
    prompts: Prompts | None
    random_state: int
    backend: str
    """What MLX computes with."""


def run(config: GenerateConfig, transport: Transport, blas: Blas) -> None:
    """Generate as rank 0's ``config`` says. Collective.

    Raises ``AgreedError`` on all ranks alike for what the user can mend, before weights are read.
    """
    config = transport.broadcast(config, what="options")
    # Answers on stdout are for another program to read.
    is_quiet = transport.rank != 0 or not config.verbose or _answers_on_stdout(config)
    reporter = Reporter(quiet=is_quiet)
    reporter.say(str(blas))
    maybe_set_recommended_wired_limit()
    transport.activity = "loading"
    prepared = prepare(config, transport, reporter)
    if prepared.prompts is None:
        follower = Follower(
            transport,
            prepared.part,
            max_kv_size=config.max_kv_size,
            random_state=prepared.random_state,
        )
        follower.run()
    else:
        plan = prepared.plan
        leader = Leader(
            transport,
            prepared.part,
            Scheduler(plan.groups, plan.most, plan.chunk),
            max_kv_size=config.max_kv_size,
            random_state=prepared.random_state,
        )
        _lead(prepared, prepared.prompts, leader, reporter)
    _report_memory(prepared, reporter)


def prepare(config: GenerateConfig, transport: Transport, reporter: Reporter) -> Prepared:
    """Check everything, then load this rank's part."""
    with transport.patient(SETUP_SECONDS):
        path = together(transport, "looking for the model", lambda: find_model(config.model))
    model_config = together(transport, "reading config.json", lambda: read_config(path))
    together(transport, "checking config.json", lambda: ModelShape.from_config(model_config))
    prompts = by_rank_0(
        transport,
        "reading the prompts",
        lambda: read_requests(config, path, model_config.get("eos_token_id")),
    )
    load = transport.broadcast(prompts and prompts.load, what="prompts")
    workload = together(
        transport,
        "reading the headers",
        lambda: Workload.of(
            open_model(str(path)),
            TrainConfig(model=config.model, dtype=config.dtype, num_layers=-1, test=True),
        ),
    )
    cluster = cluster_of(transport, config.hosts, None)
    digest = model_digest(model_config)
    plan = together(
        transport,
        "planning",
        lambda: plan_inference(config, load, workload, cluster, digest),
    )
    compare_plans(transport, plan.digest)
    start, stop = plan.stage_map.partition.ranges[transport.rank]
    part, state = together(
        transport, "building the model", lambda: _build(config, path, start, stop)
    )
    reporter.say(_headline(config, plan))
    if config.max_kv_size is not None and workload.shape.model_type in CHOOSE_CACHES:
        reporter.warn(
            f"--max-kv-size {config.max_kv_size} changes nothing: models of type "
            f"{workload.shape.model_type} choose their caches themselves, in mlx-lm too"
        )
    with transport.patient(SETUP_SECONDS):
        part.load()
        transport.barrier("loading")
    return Prepared(config, transport, plan, workload, part, prompts, state, cluster.backend)


def read_requests(config: GenerateConfig, path: Path, eos: Any) -> Prompts:
    """What ``config`` wants generated, tokenised as mlx-lm does it. ``UserError``."""
    if config.prompts is not None:
        requests = read_prompts(config.prompts, config.max_tokens)
    else:
        prompt = config.prompt.replace("\\n", "\n").replace("\\t", "\t")
        prompt = read_stdin() if prompt == "-" else prompt
        if not prompt:
            raise UserError("--prompt is empty: give a text")
        messages = ({"role": "user", "content": prompt},)
        requests = [Request(messages, config.max_tokens, "--prompt", prompt)]
    if config.output is not None:
        check_writable(Path(config.output), "--output")
    tokenizer = _tokenizer(config, path, eos)
    reader = PromptReader(
        tokenizer=tokenizer,
        system_prompt=config.system_prompt,
        prefill_response=config.prefill_response,
        template_arguments=config.template_arguments,
    )
    return Prompts(tokenizer, requests, [_tokenise(config, reader, each) for each in requests])


def _tokenizer(config: GenerateConfig, path: Path, eos: Any) -> TokenizerWrapper:
    tokenizer = read_tokenizer(path, config.trust_remote_code, eos)
    for token in (config.extra_eos_token or "").split():
        try:
            tokenizer.add_eos_token(token)
        except ValueError:
            raise UserError(
                f"--extra-eos-token {token}: the tokenizer knows no such token: name one of its own"
            ) from None
    return tokenizer


def _tokenise(config: GenerateConfig, reader: PromptReader, request: Request) -> tuple[int, ...]:
    try:
        if request.prompt is not None and (config.ignore_chat_template or not reader.has_template):
            return reader.text(request.prompt)
        return reader.chat(request.messages)
    except UserError as error:
        raise UserError(f"{request.where}: {error}") from None


def _build(config: GenerateConfig, path: Path, start: int, stop: int) -> tuple[Slice, int]:
    model = build_to_generate(
        path, dtype=config.dtype, adapter_path=config.adapter_path, seed=config.seed
    )
    return Slice(model, start, stop), random_state()


def _headline(config: GenerateConfig, plan: InferencePlan) -> str:
    sizes = " + ".join(map(str, plan.stage_map.partition.sizes))
    stages = plan.stage_map.num_stages
    return (
        f"{config.model}: {stages} stage{'s' if stages > 1 else ''} of {sizes} layers, prompts in "
        f"chunks of {plan.chunk} tokens"
    )


@dataclass(slots=True)
class Text:
    """An answer as it comes. ``finish_reason`` is None until it is complete."""

    request: Request
    prompt_tokens: int
    detokenizer: Any
    eos: frozenset[int]
    count: int = 0
    started: float = field(default_factory=time.perf_counter)
    first: float = 0.0
    last: float = 0.0
    finish_reason: str | None = None

    def take(self, token: int) -> str:
        """The text that a token adds."""
        self.last = time.perf_counter()
        if self.count == 0:
            self.first = self.last
        self.count += 1
        if token in self.eos:
            self.finish_reason = "stop"
        else:
            self.detokenizer.add_token(token)
            if self.count == self.request.max_tokens:
                self.finish_reason = "length"
        if self.finish_reason is not None:
            self.detokenizer.finalize()
        segment: str = self.detokenizer.last_segment
        return segment

    @property
    def answer(self) -> dict[str, Any]:
        """The line of ``--output``."""
        return {
            "text": self.detokenizer.text,
            "prompt_tokens": self.prompt_tokens,
            "generation_tokens": self.count,
            "finish_reason": self.finish_reason,
        }


def _lead(prepared: Prepared, prompts: Prompts, leader: Leader, reporter: Reporter) -> None:
    """On rank 0: generate all texts, and give them out."""
    eos = frozenset(prompts.tokenizer.eos_token_ids)
    texts = []
    mx.reset_peak_memory()
    for number, (request, tokens) in enumerate(zip(prompts.requests, prompts.tokens, strict=True)):
        texts.append(Text(request, len(tokens), prompts.tokenizer.detokenizer, eos))
        leader.add(number, tokens, choice_of(prepared.config, prompts.tokenizer, number))
    if prepared.config.prompts is None:
        _stream(texts[0], leader, reporter)
    else:
        with (
            _answers(prepared.config) as answers,
            reporter.bar("generating", len(texts)) as bar,
        ):
            _write(texts, leader, answers, bar)
        _summary(texts, reporter)
    leader.stop()


def choice_of(config: GenerateConfig, tokenizer: TokenizerWrapper, number: int) -> Choice:
    """How the tokens of text ``number`` are chosen."""
    return Choice(
        temp=config.temp,
        top_p=config.top_p,
        min_p=config.min_p,
        top_k=config.top_k,
        min_tokens_to_keep=config.min_tokens_to_keep,
        xtc_probability=config.xtc_probability,
        xtc_threshold=config.xtc_threshold,
        xtc_special_tokens=(*tokenizer.encode("\n"), *tokenizer.eos_token_ids),
        stream=number,
    )


def _stream(text: Text, leader: Leader, reporter: Reporter) -> None:
    """One text, as it comes."""
    reporter.say(RULE)
    try:
        while not leader.is_idle:
            for number, chosen in leader.step():
                segment = text.take(chosen.token)
                if text.finish_reason is not None:
                    leader.finish(number)
                print(segment, end="", flush=True)
    finally:
        print(flush=True)  # what is said of a failure begins a line
    reporter.say(RULE)
    if not text.detokenizer.text:
        reporter.say("No text generated for this prompt")
        return
    prompt_seconds = max(text.first - text.started, 1e-9)
    seconds = max(text.last - text.first, 1e-9)
    reporter.say(
        f"Prompt: {text.prompt_tokens} tokens, "
        f"{text.prompt_tokens / prompt_seconds:.3f} tokens-per-sec"
    )
    reporter.say(f"Generation: {text.count} tokens, {text.count / seconds:.3f} tokens-per-sec")


def _write(texts: Sequence[Text], leader: Leader, answers: IO[str], bar: Bar) -> None:
    """All texts, as lines in the order of their prompts."""
    written = 0
    while not leader.is_idle:
        for number, chosen in leader.step():
            text = texts[number]
            text.take(chosen.token)
            if text.finish_reason is None:
                continue
            leader.finish(number)
            bar.advance()
            while written < len(texts) and texts[written].finish_reason is not None:
                answers.write(json.dumps(texts[written].answer, ensure_ascii=False) + "\n")
                answers.flush()
                written += 1


def _answers_on_stdout(config: GenerateConfig) -> bool:
    return config.prompts is not None and config.output is None


@contextmanager
def _answers(config: GenerateConfig) -> Iterator[IO[str]]:
    if config.output is None:
        yield sys.stdout
        return
    with Path(config.output).open("w", encoding="utf-8") as file:
        yield file


def _summary(texts: Sequence[Text], reporter: Reporter) -> None:
    seconds = max(max(t.last for t in texts) - min(t.started for t in texts), 1e-9)
    prompts = sum(text.prompt_tokens for text in texts)
    generated = sum(text.count for text in texts)
    reporter.say(
        f"{len(texts)} texts in {seconds:.1f} s: {prompts} prompt tokens, {generated} generated, "
        f"{(prompts + generated) / seconds:.3f} tokens-per-sec together"
    )


def _report_memory(prepared: Prepared, reporter: Reporter) -> None:
    """A line for each rank: its layers, and what it held. Collective."""
    transport, plan = prepared.transport, prepared.plan
    mine = (prepared.part.nbytes, mx.get_peak_memory())
    everyone = transport.gather(mine, what="memory")
    if everyone is None:
        return
    reporter.say(f"Peak memory: {max(peak for _, peak in everyone) / 1e9:.3f} GB")
    predicted = predicted_memory(plan, prepared.workload, prepared.backend)
    reporter.table(
        ("rank", "host", "layers", "weights", "peak memory", "predicted"),
        [
            (
                str(rank),
                transport.hosts[rank],
                f"{start}-{stop - 1}",
                gigabytes(weights),
                gigabytes(peak),
                gigabytes(predicted[rank]),
            )
            for rank, ((weights, peak), (start, stop)) in enumerate(
                zip(everyone, plan.stage_map.partition.ranges, strict=True)
            )
        ],
    )
