"""Drafts by a small model with the same tokenizer, whole on rank 0 (Leviathan et al.,
arXiv:2211.17192; Chen et al., arXiv:2302.01318): it takes the likeliest tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import make_prompt_cache, trim_prompt_cache
from mlx_lm.tokenizer_utils import TokenizerWrapper

from shardmlx.config.inference import InferenceConfig
from shardmlx.errors import UserError, naming
from shardmlx.inference.drafts import Draft, Drafter
from shardmlx.inference.kv_caches import Caches, cut
from shardmlx.inference.prefix_cache import common_length
from shardmlx.loading.build import build_to_generate
from shardmlx.loading.hub_download import find_model
from shardmlx.loading.tokenizer import read_tokenizer
from shardmlx.modelfiles.model_files import open_model
from shardmlx.models.sizes.config_reader import read_config
from shardmlx.models.sizes.kv_cache import STEP, parts_of
from shardmlx.planning.facts.workload import ModelSizes, model_sizes

KIND = 0
"""The kind of all its drafts."""

ENTER = 2
"""Tokens that may enter with the first draft, each with logits: so many are new after a round in
which all were right."""


@dataclass(frozen=True, slots=True)
class DraftFiles:
    """The files of a model that drafts, and its sizes."""

    path: Path
    sizes: ModelSizes


def find_draft_model(config: InferenceConfig, tokenizer: TokenizerWrapper) -> DraftFiles:
    """Find the model that is to draft, and download it if need be. Raises ``UserError`` where its
    tokenizer is not that of the model which verifies."""
    with naming(f"--draft {config.draft}"):
        path = find_model(config.draft, None)
        own = read_tokenizer(path, config.trust_remote_code, read_config(path))
        sizes = model_sizes(open_model(str(path)), config.dtype)
    if own.get_vocab() != tokenizer.get_vocab():
        raise UserError(
            f"--draft {config.draft}: its tokenizer is not that of --model {config.source.model}",
            "name a smaller model of the same family",
        )
    return DraftFiles(path, sizes)


@dataclass(slots=True)
class _Entered:
    """The ``tokens``, drafts too, that have entered the ``caches`` of a sequence."""

    caches: Caches
    tokens: np.ndarray

    def keep(self, text: Sequence[int]) -> int:
        """Forget what is not of ``text``; return how many tokens are, the last one not counted."""
        same = common_length(self.tokens, np.array(text[:-1], np.int32))
        rejected = len(self.tokens) - same
        if rejected < STEP:
            trim_prompt_cache(self.caches, rejected)
            return same
        for cache in self.caches:  # another text took more room
            for part in parts_of(cache):
                cut(part, same)
        return same


@dataclass
class ModelDrafter(Drafter):
    """A drafter that asks a ``model``, which gets at most ``chunk`` tokens of a prompt at a time.
    Tokens from ``vocabulary`` on are padding, of which one of the models may have more."""

    model: nn.Module
    vocabulary: int
    chunk: int
    _entered: dict[int, _Entered] = field(default_factory=dict)
    _last: _Entered | None = None

    @classmethod
    def of(cls, files: DraftFiles, dtype: str | None, vocabulary: int, chunk: int) -> ModelDrafter:
        """Build the model lazily; ``vocabulary`` is that of the one that verifies."""
        model = build_to_generate(files.path, dtype=dtype, adapter_path=None, seed=None)
        return cls(model, min(vocabulary, files.sizes.shape.vocab_size), chunk)

    def read_weights(self) -> None:
        """Read the model's weights, which are lazy until then."""
        mx.eval(self.model.parameters())

    def read(self, sequence: int, tokens: Sequence[int]) -> None:
        """Take in a prompt, in chunks."""
        self._enter(sequence, tokens)

    def draft(
        self, sequence: int, tokens: Sequence[int], ahead: Sequence[int], pays: Callable[[int], int]
    ) -> Draft:
        """Guess the likeliest tokens, one after the other."""
        count = pays(KIND)
        if not count:
            return Draft()
        tokens = [*tokens, *ahead]
        entered = self._enter(sequence, tokens)
        ids, drafts = self._ids(tokens[len(entered.tokens) :]), []
        for _ in range(count):
            logits = self.model(ids, cache=entered.caches)[:, -1, : self.vocabulary]
            ids = mx.argmax(logits, axis=-1, keepdims=True)
            drafts.append(ids)
        guessed = np.array(mx.concatenate(drafts, axis=1))[0].tolist()
        entered.tokens = np.array([*tokens, *guessed[:-1]], np.int32)
        return Draft(tuple(guessed), KIND)

    def _enter(self, sequence: int, tokens: Sequence[int]) -> _Entered:
        """Have all ``tokens`` enter but the last ones."""
        entered = self._entered.get(sequence)
        if entered is None:
            # A conversation goes on from its last answer.
            new = _Entered(make_prompt_cache(self.model), np.zeros(0, np.int32))
            entered, self._last = self._last or new, None
            self._entered[sequence] = entered
        same = entered.keep(tokens)
        while len(tokens) - same > ENTER:
            piece = tokens[same : min(same + self.chunk, len(tokens) - 1)]
            self.model(self._ids(piece), cache=entered.caches)
            mx.eval([cache.state for cache in entered.caches])
            same += len(piece)
        entered.tokens = np.array(tokens[:same], np.int32)
        return entered

    def _ids(self, tokens: Sequence[int]) -> mx.array:
        return mx.minimum(mx.array([*tokens])[None], self.vocabulary - 1)

    def forget(self, sequence: int) -> None:
        """Drop a sequence's caches, but for those of the last one that has ended."""
        entered = self._entered.pop(sequence, None)
        # The plan has room for the sequences under way, and for one that has ended if none is.
        self._last = None if self._entered else entered or self._last
