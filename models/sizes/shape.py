"""Read the shape of a model from its config.json, for planning. No MLX, no MPI."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from shardmlx.errors import UserError
from shardmlx.models.families import FAMILIES
from shardmlx.models.family import Family
from shardmlx.models.sizes.config_reader import AGAIN, Config
from shardmlx.models.sizes.layer_kinds import no_windows
from shardmlx.models.sizes.layer_shape import LayerShape

Sides = tuple[int, ...]


class Names(NamedTuple):
    """Prefix of the names of layers, and paths of embedding, final norm and lm_head."""

    layers: str
    embedding: str
    norm: str
    head: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Sizes of a decoder-only transformer: ``kinds`` of layers, and each layer's in ``pattern``."""

    model_type: str
    is_declared: bool
    """True if a family declares the sizes; otherwise some are guessed."""
    hidden_size: int
    vocab_size: int
    tied: bool
    kinds: tuple[LayerShape, ...]
    pattern: tuple[int, ...]
    names: Names
    untrained: str = ""
    """Reason why the model cannot be trained; empty if it can."""
    # Sets of names have no order that all ranks share: a digest of the plan leaves them out.
    refused: frozenset[str] = field(default=frozenset(), repr=False)
    """Names of tensors of an undeclared model that mlx-lm has no place for, if not quantised."""
    unchanged: frozenset[str] = field(default=frozenset(), repr=False)
    """Names of tensors of such a model that mlx-lm loads as they are."""
    before: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """Modules that are called before the layers, beside the embedding, with the sides of their
    weights: the first layer's stage has them."""
    after: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """Matrices beside the head that are applied after the layers."""
    carried_size: int = 0
    """Size of what goes from layer to layer beside hidden states."""
    has_dynamic_rope: bool = False
    """True if rotary embeddings change with the length of the text."""
    family: Family = field(compare=False, repr=False)
    """The row of the text model, or the facts of an undeclared one that its code tells."""
    chooses_caches: bool
    """True if mlx-lm's model makes its KV caches itself, and ignores ``--max-kv-size``."""
    divides: ModelShape | None = field(default=None, compare=False, repr=False)
    """The model, where these are the sizes of a rank's share of it."""

    @classmethod
    def of_layers(cls, layers: Sequence[LayerShape], **others: Any) -> ModelShape:
        """Return the shape of a model with these layers, and other fields."""
        kinds = tuple(dict.fromkeys(layers))
        return cls(kinds=kinds, pattern=tuple(map(kinds.index, layers)), **others)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> ModelShape:
        """Read the config.json of a declared family; ``UserError`` names its field."""
        model_type = config["model_type"]
        family = outer = FAMILIES[model_type]
        fields = Config(config)
        if outer.text_type:
            own = fields.get("text_config")
            if not isinstance(own, Mapping):
                fields.refuse("text_config", AGAIN)
            family = FAMILIES[outer.text_type]
            around = {**outer.defaults, **config}
            taken = {key: around[key] for key in outer.text_takes if key in around}
            fields = Config({**outer.defaults, **own, **taken})
        fields = Config({**family.defaults, **fields.fields})
        tied = family.tied == "always"
        if not tied:
            default = True if outer.tied == "by default" else None
            tied = fields.switch("tie_word_embeddings", default)
        scaling = fields.get("rope_scaling", {})
        if scaling.get("truncate") is False:
            raise UserError(
                "config.json: truncate is false", "mlx-lm's yarn always rounds: leave it out"
            )
        prefix = "language_model." if outer.text_type else ""
        model = f"{prefix}model."
        return cls.of_layers(
            family.layers(fields),
            model_type=model_type,
            is_declared=True,
            hidden_size=fields.count("hidden_size"),
            vocab_size=fields.count("vocab_size"),
            tied=tied,
            names=Names(
                f"{model}layers.", f"{model}embed_tokens", f"{model}norm", f"{prefix}lm_head"
            ),
            has_dynamic_rope="dynamic" in (scaling.get("type"), scaling.get("rope_type")),
            family=family,
            chooses_caches=outer.windows is not no_windows,
        )

    @property
    def whole(self) -> ModelShape:
        """The model of which a rank may have a share."""
        return self.divides or self

    @property
    def is_approximate(self) -> bool:
        """True if times and the memory of activations are guessed."""
        is_guessed = any(each.activation.is_guessed for each in self.kinds)
        return not self.is_declared and (is_guessed or not self.family.takes_packed)

    @property
    def takes_batches(self) -> bool:
        """True if texts can be generated in a batch: mlx-lm's dynamic ropes know one length."""
        return self.family.takes_batches and not self.has_dynamic_rope

    @property
    def takes_packed(self) -> bool:
        """True if packed rows have the loss of single ones: layers of some families take a position
        in the row for one in the sequence, and dynamic RoPE follows the row's length."""
        return self.family.takes_packed and not self.has_dynamic_rope

    @property
    def abilities(self) -> str:
        """Words on what can be done with a model of this shape."""
        if self.untrained:
            return f"generates, but cannot be trained: {self.untrained}"
        abilities = {
            "packed rows": self.takes_packed,
            "attention in pieces": self.family.takes_pieces,
            "batches of texts": self.takes_batches,
        }
        lacking = ", ".join(name for name, is_able in abilities.items() if not is_able)
        return f"trains and generates{f', but without {lacking}' if lacking else ''}"

    @property
    def num_layers(self) -> int:
        """The number of decoder layers."""
        return len(self.pattern)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The attention window of each layer in tokens, None for full causal attention."""
        return tuple(self.kinds[kind].window for kind in self.pattern)

    def unlike_layers(self, length: int) -> tuple[tuple[LayerShape, ...], tuple[int, ...]]:
        """Return the layers that differ at ``length`` tokens, and each layer's number there."""
        alike = [
            replace(kind, window=None) if (kind.window or 0) >= length else kind
            for kind in self.kinds
        ]
        kinds = tuple(dict.fromkeys(alike))
        return kinds, tuple(kinds.index(alike[kind]) for kind in self.pattern)

    def layer(self, index: int) -> LayerShape:
        """Return the sizes of the layer with this number, from 0."""
        return self.kinds[self.pattern[index]]

    def share(self, index: int, length: int) -> float:
        """Return which part of a layer's FLOPs these sizes have."""
        if self.divides is None:
            return 1.0
        return self.layer(index).flops(length) / self.divides.layer(index).flops(length)

    def _outside(self) -> int:
        """Return the number of parameters outside of the layers."""
        before = sum(math.prod(sides) for _, sides in self.before)
        return self.vocab_size * self.hidden_size + before + self.head_parameters()

    def head_parameters(self) -> int:
        """Return the number of parameters of norm and lm_head; a tied lm_head has none."""
        norm = self.hidden_size * (bool(self.names.norm) + self.family.norm_bias)
        head = self.vocab_size * (self.hidden_size + self.family.head_has_bias)
        after = sum(math.prod(sides) for _, sides in self.after)
        return norm + after + (0 if self.tied else head)

    def parameters(self) -> int:
        """Return the number of parameters of the whole model; a tied lm_head counts once."""
        layers = sum(self.kinds[kind].parameters for kind in self.pattern)
        return layers + self._outside()

    def active_parameters(self) -> int:
        """Return the number of parameters that one token passes through."""
        layers = sum(self.kinds[kind].active_parameters for kind in self.pattern)
        return layers + self._outside()

    def head_flops(self) -> float:
        """Return FLOPs of one token's forward through the lm_head; the embedding takes none."""
        return 2.0 * self.hidden_size * self.vocab_size
