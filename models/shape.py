"""Read the shape of a model from its config.json, for planning. No MLX, no MPI."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shardmlx.errors import UserError
from shardmlx.models.config_reader import Config
from shardmlx.models.family import Family
from shardmlx.models.layer_shape import LayerShape
from shardmlx.models.registry import FAMILIES, family_of
from shardmlx.models.undeclared import UNDECLARED, Names, Sides, read_tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Sizes of a decoder-only transformer.

    ``kinds`` are the different layers, ``pattern`` has the number of each layer's kind.
    ``text_type`` is the ``model_type`` of a separate text model inside. ``names`` belong to a model
    of no declared family, whose sizes were read from its tensors. ``keeps_state`` means that layers
    keep a state from token to token.
    """

    model_type: str
    text_type: str
    hidden_size: int
    vocab_size: int
    tied: bool
    kinds: tuple[LayerShape, ...]
    pattern: tuple[int, ...]
    prefix: str = ""
    names: Names | None = None
    keeps_state: bool = False
    has_dynamic_rope: bool = False
    """True if rotary embeddings change with the length of the text."""

    def __post_init__(self) -> None:
        if not self.pattern or set(self.pattern) != set(range(len(self.kinds))):
            raise ValueError(f"layers of kinds {self.pattern}, of {len(self.kinds)}")

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> ModelShape:
        """Read the fields of a config.json; ``UserError`` names the field and its value."""
        family = outer = family_of(config)
        fields, text_type = Config(config), config["model_type"]
        if outer.text is not None:
            own = fields.inner(outer.text).fields
            text_type = own.get("model_type")
            if text_type not in outer.text_types:
                text_type = outer.text_default
            family = FAMILIES[text_type]
            around = {**outer.defaults, **config}
            taken = {key: around[key] for key in outer.text_takes if key in around}
            fields = Config({**outer.defaults, **own, **taken})
        fields = Config({**family.defaults, **fields.fields})
        fields.count("num_hidden_layers")
        tied = family.tied
        if family.is_tied_by_config:
            tied = fields.switch("tie_word_embeddings", outer.tied)
        if fields.get("rope_scaling", {}).get("truncate") is False and not family.rounds_yarn:
            raise UserError(
                "config.json: truncate is false", "mlx-lm's yarn always rounds: leave it out"
            )
        layers = family.layers(fields)
        kinds = tuple(dict.fromkeys(layers))
        return cls(
            model_type=config["model_type"],
            text_type=text_type,
            hidden_size=fields.count("hidden_size"),
            vocab_size=fields.count("vocab_size"),
            tied=bool(tied),
            kinds=kinds,
            pattern=tuple(kinds.index(layer) for layer in layers),
            prefix=outer.prefix,
            has_dynamic_rope=_has_dynamic_rope(fields),
        )

    @classmethod
    def from_tensors(
        cls, config: Mapping[str, Any], tensors: Mapping[str, Sides]
    ) -> ModelShape | None:
        """Read an undeclared model from the unpacked shapes of its tensors; None if no decoder."""
        found = read_tensors(config, tensors)
        if found is None:
            return None
        kinds = tuple(dict.fromkeys(found.layers))
        model_type = str(config.get("model_type"))
        return cls(
            model_type=model_type,
            text_type=model_type,
            hidden_size=found.hidden_size,
            vocab_size=found.vocab_size,
            tied=not found.names.head,
            kinds=kinds,
            pattern=tuple(kinds.index(layer) for layer in found.layers),
            names=found.names,
            keeps_state=found.keeps_state,
        )

    @property
    def is_declared(self) -> bool:
        """True if a family declares the sizes; otherwise some are guessed."""
        return self.names is None

    @property
    def family(self) -> Family:
        """The family of the text model."""
        return FAMILIES[self.text_type] if self.is_declared else UNDECLARED

    @property
    def outer_family(self) -> Family:
        """The family of the model as a whole."""
        return FAMILIES[self.model_type] if self.is_declared else UNDECLARED

    @property
    def embedding_path(self) -> str:
        """Path of the embedding."""
        if self.names is not None:
            return self.names.embedding
        return f"{self.prefix}model.{self.family.embedding}"

    @property
    def norm_path(self) -> str:
        """Path of the final norm."""
        if self.names is not None:
            return self.names.norm
        return f"{self.prefix}model.{self.family.final_norm}"

    @property
    def head_path(self) -> str:
        """Path of a separate lm_head."""
        if self.names is not None:
            return self.names.head
        return self.prefix + self.family.head

    @property
    def chooses_caches(self) -> bool:
        """True if mlx-lm's model makes its KV caches itself, and ignores a limit of them."""
        return self.outer_family.chooses_caches

    @property
    def takes_batches(self) -> bool:
        """True if texts can be generated in a batch: mlx-lm's dynamic ropes know one length."""
        return self.family.takes_batches and not self.has_dynamic_rope

    @property
    def num_layers(self) -> int:
        """Number of decoder layers."""
        return len(self.pattern)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The attention window of each layer in tokens, None for full causal attention."""
        return tuple(self.kinds[kind].window for kind in self.pattern)

    def unlike_layers(self, length: int) -> tuple[tuple[LayerShape, ...], tuple[int, ...]]:
        """Return the different layers for texts of ``length`` tokens, and each layer's number among
        them; a window as long as the text does not count."""
        alike = [kind.seeing(length) for kind in self.kinds]
        kinds = tuple(dict.fromkeys(alike))
        return kinds, tuple(kinds.index(alike[kind]) for kind in self.pattern)

    def layer(self, index: int) -> LayerShape:
        """Return the sizes of a layer. Raises ``ValueError`` if there is none."""
        if not 0 <= index < self.num_layers:
            raise ValueError(f"layer {index} of a model of {self.num_layers}")
        return self.kinds[self.pattern[index]]

    def embedding_parameters(self) -> int:
        """Return the number of parameters of the embedding, on the first stage."""
        return self.vocab_size * self.hidden_size

    def head_parameters(self) -> int:
        """Return the number of parameters of norm and lm_head; a tied lm_head has none."""
        norm = self.hidden_size * (1 + self.family.norm_bias)
        head = self.vocab_size * (self.hidden_size + self.family.head_has_bias)
        return norm + (0 if self.tied else head)

    def parameters(self) -> int:
        """Return the number of parameters of the whole model."""
        layers = sum(self.kinds[kind].parameters for kind in self.pattern)
        return self.embedding_parameters() + layers + self.head_parameters()

    def active_parameters(self) -> int:
        """Return the number of parameters that one token passes through."""
        layers = sum(self.kinds[kind].active_parameters for kind in self.pattern)
        return self.embedding_parameters() + layers + self.head_parameters()

    def head_flops(self) -> float:
        """Return FLOPs of one token's forward through the lm_head; the embedding takes none."""
        return 2.0 * self.hidden_size * self.vocab_size


def _has_dynamic_rope(fields: Config) -> bool:
    scaling = fields.get("rope_scaling", {})
    return "dynamic" in (scaling.get("type"), scaling.get("rope_type"))
