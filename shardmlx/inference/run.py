"""A run that is loaded on a rank, ready to generate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from mlx_lm.tokenizer_utils import TokenizerWrapper

from shardmlx.common.reporter import Reporter
from shardmlx.config.inference import HEAD, NO_DRAFT, InferenceConfig
from shardmlx.distributed.transport import Transport
from shardmlx.inference.detokenize import IncrementalDetokenizer, StopStrings
from shardmlx.inference.draft_model import ModelDrafter
from shardmlx.inference.drafts import VERIFIED, BackOff, Drafting, HeadDrafter, LookupDrafter
from shardmlx.inference.grammars import Grammars
from shardmlx.inference.kv_caches import KVCaches
from shardmlx.inference.later_stage import LaterStage
from shardmlx.inference.pipeline import FirstStage
from shardmlx.inference.prefix_cache import PrefixCache
from shardmlx.inference.prefix_files import PrefixFiles
from shardmlx.inference.prompts import PromptEncoder
from shardmlx.inference.route import TokenRoute
from shardmlx.inference.sampler import BatchSampler
from shardmlx.inference.sampling_params import SamplingParams
from shardmlx.inference.scheduler import Scheduler
from shardmlx.inference.stage import StageWorker
from shardmlx.models.runtime.draft_head import DraftHead
from shardmlx.models.runtime.slice import Slice
from shardmlx.models.sizes.shape import ModelShape
from shardmlx.planning.job import GenerationPart, Job


@dataclass(frozen=True, slots=True)
class InferenceRun:
    """A run that is ready to start. ``encoder`` is there on rank 0 only, and the ``draft_model`` if
    one drafts, on the last rank the ``head`` if the model's own does; ``grammars`` are those to
    which answers may keep, ``prefix_files`` those of the prefix cache."""

    config: InferenceConfig
    transport: Transport
    reporter: Reporter
    job: Job
    shape: ModelShape
    part: Slice
    encoder: PromptEncoder | None
    random_state: int
    draft_model: ModelDrafter | None = None
    head: DraftHead | None = None
    grammars: Grammars | None = None
    prefix_files: PrefixFiles | None = None

    @property
    def generation(self) -> GenerationPart:
        """The part of the job that generates."""
        return self.job.generated

    def later_stage(self) -> LaterStage:
        """Return the stage of a rank other than 0."""
        return LaterStage(self._worker())

    def first_stage(self, patience: int | None = None) -> FirstStage:
        """Return the stage of rank 0."""
        part = self.generation
        setup = part.setup
        load = part.load
        how = setup.quantisation
        quantised = 0 if how is None else how.border
        kept = None
        if load.keeps_prefixes:
            kept = PrefixCache.of(self.shape, setup.max_kv_size, quantisation=how)
        drafting = None
        if self.config.draft != NO_DRAFT:
            own = HeadDrafter() if self.config.draft == HEAD else LookupDrafter()
            drafting = Drafting(
                self.draft_model or own,
                self.config.most_drafts,
                fixed=self.config.num_draft_tokens is not None,
                cuttable=part.cuttable,
                quantised=quantised,
                back_off=BackOff(
                    VERIFIED + self._cost_of_drafts,
                    1 if self.config.draft == HEAD else self.job.mesh.pp,
                ),
            )
        scheduler = Scheduler(
            part.groups, setup.sequences, setup.chunk, patience, load.capacity, quantised
        )
        return FirstStage(self._worker(), scheduler, kept, drafting)

    @property
    def _cost_of_drafts(self) -> float:
        """Plain steps that making a draft of one token takes: a step reads all weights."""
        setup = self.generation.setup
        sizes = setup.model.held_sizes
        return setup.beside / max(sum(sizes.layers) + sizes.embedding + sizes.head, 1)

    def _worker(self) -> StageWorker:
        holder = self.head or self.part
        setup = self.generation.setup
        caches = KVCaches(lambda: holder.new_caches(setup.max_kv_size), setup.quantisation)
        sampler = BatchSampler(self.random_state, self.grammars)
        return StageWorker(
            *(self.transport, self.part, caches, sampler, self.prefix_files, self.head),
            route=TokenRoute.of(self.job.mesh),
        )

    @property
    def sampling(self) -> SamplingParams:
        """The parameters of sampling that the options give, on rank 0."""
        return usual_sampling(self.config, self._tokenizer)

    @property
    def prompts(self) -> PromptEncoder:
        """The encoder of prompts, on rank 0."""
        assert self.encoder is not None, "rank 0 has it"
        return self.encoder

    @property
    def _tokenizer(self) -> TokenizerWrapper:
        return self.prompts.tokenizer

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


def usual_sampling(config: InferenceConfig, tokenizer: TokenizerWrapper) -> SamplingParams:
    """Return the parameters of sampling that the options give."""
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
