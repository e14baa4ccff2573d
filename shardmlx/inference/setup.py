"""Set up a run that generates, for all commands alike: plan, load, and report at the end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import mlx.core as mx
from mlx_lm.tokenizer_utils import TokenizerWrapper

from shardmlx.common.formatting import gibibytes, numbers_of, percent, plural
from shardmlx.common.reporter import Reporter
from shardmlx.config.inference import HEAD, LOOKUP, NO_DRAFT, InferenceConfig
from shardmlx.config.specs import MachineOptions, ModelSource
from shardmlx.costmodel.memory_limits import MemoryLimits, exceeded
from shardmlx.costmodel.workload import model_sizes
from shardmlx.distributed.agreement import from_rank_0, on_all_ranks, on_rank_0
from shardmlx.distributed.mlx_group import join_group
from shardmlx.distributed.transport import Transport
from shardmlx.errors import UserError
from shardmlx.inference.detokenize import IncrementalDetokenizer, StopStrings
from shardmlx.inference.draft_model import DraftFiles, ModelDrafter, find_draft_model
from shardmlx.inference.drafts import (
    FIRST,
    FIRST_OF_MODEL,
    BackOff,
    Drafting,
    HeadDrafter,
    LookupDrafter,
)
from shardmlx.inference.grammars import Grammars
from shardmlx.inference.kv_caches import KVCaches, check_quantised
from shardmlx.inference.later_stage import LaterStage
from shardmlx.inference.pipeline import FirstStage
from shardmlx.inference.plan import GenerationLoad, InferencePlan, check_gives_back, plan_inference
from shardmlx.inference.prefix_cache import PrefixCache
from shardmlx.inference.prefix_files import PrefixFiles
from shardmlx.inference.prompts import PromptEncoder
from shardmlx.inference.sampler import BatchSampler, random_state
from shardmlx.inference.sampling_params import SamplingParams
from shardmlx.inference.scheduler import Scheduler
from shardmlx.inference.stage import StageWorker
from shardmlx.loading.build import build_draft_head, build_to_generate
from shardmlx.loading.rank_setup import (
    SETUP_SECONDS,
    OpenedModel,
    compare_plans,
    gather_plan_inputs,
    limit_memory,
    open_on_all_ranks,
)
from shardmlx.loading.tokenizer import read_tokenizer
from shardmlx.modelfiles.model_files import open_model
from shardmlx.models.divided_layers import take_share
from shardmlx.models.draft_head import DraftHead
from shardmlx.models.shape import ModelShape
from shardmlx.models.slice import Slice

TYPICAL_PROMPT = 512  # tokens, as assumed where no prompt is known yet

Read = Callable[[PromptEncoder], GenerationLoad]
"""Function that says on rank 0 how much is to be generated. Raises ``UserError``."""


@dataclass(frozen=True, slots=True)
class InferenceRun:
    """A run that is ready to start. ``encoder`` is there on rank 0 only, and the ``draft_model`` if
    one drafts, on the last rank the ``head`` if the model's own does; ``grammars`` are those to
    which answers may keep, ``prefix_files`` those of the prefix cache."""

    config: InferenceConfig
    transport: Transport
    reporter: Reporter
    plan: InferencePlan
    shape: ModelShape
    part: Slice
    encoder: PromptEncoder | None
    random_state: int
    limits: tuple[MemoryLimits, ...]
    draft_model: ModelDrafter | None = None
    head: DraftHead | None = None
    grammars: Grammars | None = None
    prefix_files: PrefixFiles | None = None

    def hold(self, lead: Callable[[PromptEncoder], None]) -> None:
        """Let rank 0 ``lead`` until it stops its first stage, while the others follow; then show
        what each rank took. All ranks must call it."""
        if self.encoder is None:
            self.later_stage().run()
        else:
            lead(self.encoder)
        report_memory(self)

    def later_stage(self) -> LaterStage:
        return LaterStage(self._worker())

    def first_stage(self, patience: int | None = None) -> FirstStage:
        """Return the stage of rank 0."""
        setup, load = self.plan.setup, self.plan.load
        kept = PrefixCache.of(self.shape, setup.max_kv_size) if load.keeps_prefixes else None
        drafting = None
        if self.config.draft != NO_DRAFT:
            own = HeadDrafter() if self.config.draft == HEAD else LookupDrafter()
            drafting = Drafting(
                self.draft_model or own,
                self.config.most_drafts,
                fixed=self.config.num_draft_tokens is not None,
                cuttable=self.plan.cuttable,
                quantised=0 if setup.quantisation is None else setup.quantisation.start,
                back_off=BackOff(
                    FIRST if self.config.draft == LOOKUP else FIRST_OF_MODEL,
                    1 if self.config.draft == HEAD else self.plan.stage_map.num_stages,
                ),
            )
        scheduler = Scheduler(
            self.plan.groups, setup.sequences, setup.chunk, patience, load.capacity
        )
        return FirstStage(self._worker(), scheduler, kept, drafting)

    def _worker(self) -> StageWorker:
        holder, setup = self.head or self.part, self.plan.setup
        caches = KVCaches(lambda: holder.new_caches(setup.max_kv_size), setup.quantisation)
        sampler = BatchSampler(self.random_state, self.grammars)
        return StageWorker(
            *(self.transport, self.part, caches, sampler, self.prefix_files, self.head),
            mesh=self.plan.mesh,
        )

    @property
    def sampling(self) -> SamplingParams:
        """The parameters of sampling that the options give, on rank 0."""
        config, tokenizer = self.config, self._tokenizer
        return SamplingParams(
            temp=config.temp,
            top_p=config.top_p,
            min_p=config.min_p,
            top_k=config.top_k,
            min_tokens_to_keep=config.min_tokens_to_keep,
            xtc_probability=config.xtc_probability,
            xtc_threshold=config.xtc_threshold,
            # XTC never leaves them out, as in mlx-lm.
            xtc_special_tokens=(*tokenizer.encode("\n"), *tokenizer.eos_token_ids),
        )

    @property
    def _tokenizer(self) -> TokenizerWrapper:
        assert self.encoder is not None, "rank 0 has it"
        return self.encoder.tokenizer

    def ask(
        self,
        first_stage: FirstStage,
        number: int,
        tokens: Sequence[int],
        max_tokens: int,
        stops: StopStrings | None = None,
        *,
        params: SamplingParams | None = None,
        before: Sequence[int] = (),
    ) -> IncrementalDetokenizer:
        """Begin the answer to a prompt on rank 0, sampled by ``params``, or as the options say from
        random stream ``number``. Its text goes on from the tokens ``before`` it."""
        answer = IncrementalDetokenizer.of(self._tokenizer, max_tokens, stops, before)
        params = params or replace(self.sampling, stream=number)
        first_stage.add(number, tokens, params, len(tokens) + max_tokens)
        return answer


def prepare(
    config: InferenceConfig, transport: Transport, reporter: Reporter, read: Read
) -> InferenceRun:
    """Check everything, then load this rank's layers. All ranks must call it. Raises
    ``AgreedError`` for what the user can mend, before weights are read."""
    transport.activity.begin("loading")
    source = ModelSource.of(config)
    with open_on_all_ranks(transport, reporter, source, config.adapter_path) as opened:
        shape = opened.shape

        def read_prompts() -> tuple[PromptEncoder, GenerationLoad]:
            encoder = PromptEncoder(
                tokenizer=_tokenizer(config, opened),
                template_arguments=config.template_arguments,
                vocabulary=shape.vocab_size,
                positions=opened.max_positions,
            )
            return encoder, read(encoder)

        encoder, mine = on_rank_0(transport, "reading the prompts", read_prompts) or (None, None)
        load = transport.broadcast(mine, what="prompts")
        draft = _find_draft_model(config, transport, encoder)
        head = None
        if config.draft == HEAD:
            head = on_all_ranks(transport, "building the head", partial(_head, config, opened))
        inputs = gather_plan_inputs(
            transport,
            lambda: model_sizes(open_model(str(opened.path)), config.dtype),
            MachineOptions.of(config),
            config.stage_map,
            config.bytes_for_requests if transport.rank == 0 else 0,
        )
        sizes = None if draft is None else draft.sizes
        of_head = 0 if head is None else head.nbytes
        planned = partial(plan_inference, config, inputs, load, opened.digest, sizes, of_head)
        plan = on_all_ranks(transport, "planning", planned)
        compare_plans(transport, plan.digest)
        all_sum, mesh = None, plan.mesh
        if mesh.tp > 1:
            all_sum = join_group(transport, mesh.sharing(transport.rank), reporter)

        def build() -> tuple[Slice, int, ModelDrafter | None]:
            model = build_to_generate(
                opened.path, dtype=config.dtype, adapter_path=opened.adapters, seed=config.seed
            )
            part = Slice(model, *plan.ranges[transport.rank])
            if all_sum is not None:
                take_share(part, shape, plan.shares, mesh.share(transport.rank), all_sum)
            if config.cache_quantisation is not None:
                check_quantised(part, config.cache_quantisation, shape.model_type)
            state, drafter = random_state(), None
            if draft is not None and transport.rank == 0:
                drafter = ModelDrafter.of(draft, config.dtype, shape.vocab_size, plan.setup.chunk)
            return part, state, drafter

        part, state, drafter = on_all_ranks(transport, "building the model", build)
        _announce(config, plan, reporter)
        limits = limit_memory(
            transport.rank, inputs.budgets, plan.memory, inputs.cluster.backend, reporter
        )
        with transport.longer_timeout(SETUP_SECONDS):
            head = head if part.is_last else None
            # The layer after the last, and the embedding.
            further = ((shape.num_layers, shape.num_layers + 1), (0, 0)) if head else ()
            opened.weights.load([part], shape, reporter, further, plan.shares)
            if head is not None:
                head.beside(part)
            if drafter is not None:
                drafter.read_weights()
            transport.barrier("loading")
        mx.reset_peak_memory()
        return InferenceRun(
            config, transport, reporter, plan, shape, part, encoder, state, limits, drafter, head
        )


def _head(config: InferenceConfig, opened: OpenedModel) -> DraftHead:
    """Build the model's own head. Raises ``UserError``."""
    check_gives_back(opened.shape, config.draft)
    return build_draft_head(opened.path, config.dtype)


def _find_draft_model(
    config: InferenceConfig, transport: Transport, encoder: PromptEncoder | None
) -> DraftFiles | None:
    """Find the model that drafts, if one does, for rank 0, which has the ``encoder``. Collective.
    Raises ``AgreedError``."""
    if config.draft_model is None:
        return None

    def find() -> DraftFiles:
        assert encoder is not None, "rank 0 has it"
        return find_draft_model(config, encoder.tokenizer)

    with transport.longer_timeout(SETUP_SECONDS):
        return from_rank_0(transport, "looking for the model that drafts", find)


def _tokenizer(config: InferenceConfig, opened: OpenedModel) -> TokenizerWrapper:
    tokenizer = read_tokenizer(opened.path, config.trust_remote_code, opened.config)
    for token in config.extra_eos_token:
        try:
            tokenizer.add_eos_token(token)
        except ValueError:
            raise UserError(
                f"--extra-eos-token {token}: the tokenizer knows no such token",
                "name one of its own",
            ) from None
    return tokenizer


def _announce(config: InferenceConfig, plan: InferencePlan, reporter: Reporter) -> None:
    sizes = " + ".join(map(str, plan.stage_map.partition.sizes))
    across, on = plan.shares.size, ""
    if across > 1:
        shares = ":".join(map(str, plan.shares.weights))
        on = f", each on {across} ranks with tensor shares {shares}"
    reporter.say(
        f"{config.model}: {plural(plan.stage_map.num_stages, 'stage')} of {sizes} layers{on}, "
        f"prompts in chunks of {plan.setup.chunk} tokens"
    )
    if (how := plan.setup.quantisation) is not None:
        plain = replace(plan, setup=replace(plan.setup, quantisation=None))
        packed, whole = (" + ".join(map(gibibytes, each.caches)) for each in (plan, plain))
        reporter.say(
            f"KV caches of sequences from {how.start} tokens on in {how.bits} bits: at most "
            f"{packed}, not {whole}"
        )
    for nbytes, rank in ((plan.setup.beside, 0), (plan.setup.head, plan.stage_map.pp - 1)):
        if nbytes:
            reporter.say(f"--draft {config.draft}: {gibibytes(nbytes)} on rank {rank}")
    if config.draft != NO_DRAFT and plan.load.context > plan.cuttable:
        reporter.say(
            f"--draft {config.draft}: texts of {plan.cuttable} tokens and more get no drafts, "
            "since their sliding windows cannot give back what is rejected"
        )
    if config.max_kv_size is not None and plan.setup.model.shape.chooses_caches:
        reporter.warn(
            f"--max-kv-size {config.max_kv_size} changes nothing: models of type "
            f"{plan.setup.model.shape.model_type} choose their caches themselves, in mlx-lm too"
        )


def typical_load(
    config: InferenceConfig,
    sequences: int,
    capacity: int,
    encoder: PromptEncoder,
    *,
    keeps_prefixes: bool = False,
) -> GenerationLoad:
    """Return the load before any prompt is known, with KV caches of ``capacity`` tokens, and with a
    prefix cache if it ``keeps_prefixes``."""
    context = min(capacity, encoder.positions or capacity)
    answer = min(config.max_tokens, context // 2)
    prompt = min(TYPICAL_PROMPT, context)
    return GenerationLoad(sequences, prompt, answer, context, capacity, keeps_prefixes)


def report_memory(prepared: InferenceRun) -> None:
    """Print a table of the layers and the memory of each rank. All ranks must call it."""
    transport, plan, reporter = prepared.transport, prepared.plan, prepared.reporter
    mine = (prepared.part.nbytes, mx.get_peak_memory())
    everyone = transport.gather(mine, what="memory")
    if everyone is None:
        return
    reporter.say(f"Peak memory: {gibibytes(max(peak for _, peak in everyone))}")
    predicted = [limits.planned.peak for limits in prepared.limits]
    reporter.table(
        ("rank", "host", "layers", "weights", "peak memory", "predicted", ""),
        [
            (
                str(rank),
                transport.hosts[rank],
                numbers_of(start, stop),
                gibibytes(weights),
                gibibytes(peak),
                gibibytes(predicted[rank]),
                percent(peak, predicted[rank]),
            )
            for rank, ((weights, peak), (start, stop)) in enumerate(
                zip(everyone, plan.ranges, strict=True)
            )
        ],
    )
    for warning in exceeded(prepared.limits, transport.hosts, [peak for _, peak in everyone]):
        reporter.warn(warning)
