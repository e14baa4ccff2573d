"""Read the shape of a model from its config.json: what planning needs. No MLX, no MPI.

The arithmetic follows mlx-lm's model files: llama (also mistral), ministral3, mixtral, qwen2,
qwen3. A matrix product of m x k by k x n counts 2 m k n FLOPs; norms, activations and rotary
embedding are left out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardmlx.errors import UserError
from shardmlx.models.traits import TRAITS

SUPPORTED = tuple(TRAITS)
"""The ``model_type`` names that can be cut into stages."""

MOST_LAYERS = 10_000
"""Limit of ``num_hidden_layers``: a typing error beyond it would fill the memory with layers."""

_AGAIN = "download the model's config.json again"

_MOST = {"num_hidden_layers": MOST_LAYERS, "num_local_experts": 1024}
_MOST_OF_ANYTHING = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Sizes of a decoder-only transformer.

    ``num_experts`` is 0 without a mixture of experts. ``windows`` has the attention window of
    each layer in tokens, None for full causal attention. ``UserError`` for sizes that do not fit.
    """

    model_type: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    tied: bool
    num_experts: int = 0
    experts_per_token: int = 0
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    windows: tuple[int | None, ...]

    def __post_init__(self) -> None:
        if len(self.windows) != self.num_layers:
            raise ValueError(f"{len(self.windows)} windows for {self.num_layers} layers")
        if self.num_heads % self.num_kv_heads:
            raise UserError(
                f"config.json: num_attention_heads {self.num_heads} is not divisible by "
                f"num_key_value_heads {self.num_kv_heads}",
                _AGAIN,
            )
        if self.experts_per_token > self.num_experts:
            raise UserError(
                f"config.json: num_experts_per_tok {self.experts_per_token} is more than "
                f"num_local_experts {self.num_experts}",
                _AGAIN,
            )

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> ModelShape:
        """Read the fields of a config.json; ``UserError`` names the field and its value."""
        model_type = config.get("model_type")
        if model_type not in SUPPORTED:
            raise UserError(
                f"model_type {model_type!r} is not supported",
                f"use a model of type {', '.join(SUPPORTED)}",
            )
        traits = TRAITS[model_type]
        num_layers = _count(config, "num_hidden_layers")
        hidden_size = _count(config, "hidden_size")
        num_heads = _count(config, "num_attention_heads")
        if model_type == "qwen3" or (traits.is_llama_like and config.get("head_dim") is not None):
            head_dim = _count(config, "head_dim")
        elif hidden_size % num_heads:
            raise UserError(
                f"config.json: hidden_size {hidden_size} is not divisible by "
                f"num_attention_heads {num_heads}",
                _AGAIN,
            )
        else:
            head_dim = hidden_size // num_heads
        is_moe = model_type == "mixtral"
        has_attention_bias = traits.may_have_biases and _switch(config, "attention_bias", False)
        has_mlp_bias = traits.may_have_biases and _switch(config, "mlp_bias", False)
        return cls(
            model_type=model_type,
            num_layers=num_layers,
            hidden_size=hidden_size,
            intermediate_size=_count(config, "intermediate_size"),
            num_heads=num_heads,
            num_kv_heads=_count(
                config, "num_key_value_heads", num_heads if traits.is_llama_like else _REQUIRED
            ),
            head_dim=head_dim,
            vocab_size=_count(config, "vocab_size"),
            tied=_switch(config, "tie_word_embeddings", traits.tied),
            num_experts=_count(config, "num_local_experts") if is_moe else 0,
            experts_per_token=_count(config, "num_experts_per_tok") if is_moe else 0,
            qkv_bias=has_attention_bias or model_type == "qwen2",
            output_bias=has_attention_bias,
            mlp_bias=has_mlp_bias,
            qk_norm=model_type == "qwen3",
            windows=_windows(config, num_layers),
        )

    def layer_parameters(self, layer: int) -> int:
        """Return the number of parameters of a decoder layer; all layers have as many."""
        self._check_layer(layer)
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        biases = self.qkv_bias * (queries + 2 * keys) + self.output_bias * self.hidden_size
        biases += self.mlp_bias * (2 * self.intermediate_size + self.hidden_size)
        norms = 2 * self.hidden_size + self.qk_norm * 2 * self.head_dim
        mlps = max(self.num_experts, 1) * self._mlp_products + self._router_products
        return self._projection_products + mlps + biases + norms

    def embedding_parameters(self) -> int:
        """Return the number of parameters of the embedding, on the first stage."""
        return self.vocab_size * self.hidden_size

    def head_parameters(self) -> int:
        """Return the number of parameters of norm and lm_head; a tied one is the embedding."""
        return self.hidden_size + (0 if self.tied else self.vocab_size * self.hidden_size)

    def parameters(self) -> int:
        """Return the number of parameters of the whole model."""
        layers = sum(map(self.layer_parameters, range(self.num_layers)))
        return self.embedding_parameters() + layers + self.head_parameters()

    def layer_flops(self, layer: int, sequence_length: int) -> float:
        """Return FLOPs of one token's forward through a layer, averaged over the sequence.

        Causal attention sees (length + 1) / 2 tokens in the mean, fewer through a window.
        """
        self._check_layer(layer)
        seen = _mean_context(sequence_length, self.windows[layer])
        attention = 2 * self.num_heads * self.head_dim * seen  # scores, and their use on values
        mlps = max(self.experts_per_token, 1) * self._mlp_products + self._router_products
        return 2 * (self._projection_products + attention + mlps)

    def head_flops(self) -> float:
        """Return FLOPs of one token's forward through the lm_head; the embedding takes none."""
        return 2.0 * self.hidden_size * self.vocab_size

    @property
    def _projection_products(self) -> int:
        """Multiply-adds a token in the q, k, v and o projections; also their weights."""
        return 2 * self.hidden_size * (self.num_heads + self.num_kv_heads) * self.head_dim

    @property
    def _mlp_products(self) -> int:
        return 3 * self.hidden_size * self.intermediate_size

    @property
    def _router_products(self) -> int:
        return self.hidden_size * self.num_experts

    def _check_layer(self, layer: int) -> None:
        if not 0 <= layer < self.num_layers:
            raise ValueError(f"layer {layer} of a model of {self.num_layers}")


def read_config(model_dir: str | Path) -> dict[str, Any]:
    """Return the config.json of a model directory; ``UserError`` when it is missing or broken."""
    directory = Path(model_dir)
    path = directory / "config.json"
    if not directory.is_dir():
        raise UserError(f"model directory {directory} does not exist", "check --model")
    try:
        return parse_config(path.read_bytes(), path)
    except FileNotFoundError:
        raise UserError(
            f"model directory {directory} has no config.json",
            "point --model at a directory in the Hugging Face layout",
        ) from None
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from None


def parse_config(text: bytes, where: str | Path) -> dict[str, Any]:
    """Return the content of a config.json; ``UserError`` when it is broken."""
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where} is not valid JSON ({error})", "copy it again") from None
    if not isinstance(config, dict):
        raise UserError(f"{where} holds no JSON object", "copy it again")
    return config


_REQUIRED = object()


def _count(config: Mapping[str, Any], key: str, default: Any = _REQUIRED) -> int:
    value = config.get(key)
    if value is None and default is not _REQUIRED:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        found = f"is {value!r}" if key in config else "is missing"
        raise UserError(f"config.json: {key} {found}", "it must be a whole number above 0")
    most = _MOST.get(key, _MOST_OF_ANYTHING)
    if value > most:
        digits = str(value)
        shown = digits if len(digits) < 30 else f"a number of {len(digits)} digits"
        raise UserError(f"config.json: {key} is {shown}", f"give at most {most}")
    return value


def _switch(config: Mapping[str, Any], key: str, default: bool | None) -> bool:
    value = config.get(key, default)
    if not isinstance(value, bool):
        found = f"is {value!r}" if key in config else "is missing"
        raise UserError(f"config.json: {key} {found}", "it must be true or false")
    return value


def _windows(config: Mapping[str, Any], num_layers: int) -> tuple[int | None, ...]:
    """Return the window of each layer.

    Only ``layer_types`` makes layers sliding: mlx-lm passes over a bare ``sliding_window``.
    """
    kinds = config.get("layer_types")
    if not TRAITS[config["model_type"]].is_llama_like or kinds is None:
        return (None,) * num_layers
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        found = f"{len(kinds)} entries" if isinstance(kinds, list) else repr(kinds)
        raise UserError(
            f"config.json: layer_types has {found}", f"list one for each of {num_layers}"
        )
    for kind in kinds:
        if kind not in ("full_attention", "sliding_attention"):
            raise UserError(
                f"config.json: layer_types names {kind!r}",
                "only full_attention and sliding_attention are supported",
            )
    if "full_attention" not in kinds:
        raise UserError("config.json: layer_types has no full_attention", "mlx-lm needs one")
    if "sliding_attention" not in kinds:
        return (None,) * num_layers
    window = _count(config, "sliding_window")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _mean_context(length: int, window: int | None) -> float:
    """Return the mean, over positions from 0, of the tokens seen: min(position + 1, window)."""
    if length < 1:
        raise ValueError(f"a sequence of {length} tokens")
    if window is None or window >= length:
        return (length + 1) / 2
    return window * (window + 1) / (2 * length) + (length - window) * window / length
