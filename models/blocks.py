"""Attention and MLPs of a decoder layer, by the columns of a family's row. No MLX, no MPI.

A ``Fact`` is true, false, or the field of config.json that says so, false if it is missing.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardmlx.errors import UserError
from shardmlx.models.config_reader import AGAIN, Config, Fact
from shardmlx.models.layer_shape import Heads, LayerShape, Linear, Norm

GATED = ("gate_proj", "up_proj", "down_proj")
GATED_W = ("w1", "w3", "w2")
"""Names of the matrices of a gated MLP, in the order gate, up, down."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grouped:
    """Columns of attention whose queries share keys and values in groups."""

    head_dim: str = "head_dim"
    """Field with the size of a head; without it hidden size by heads, as for an empty name."""
    bias: Fact = False
    output_bias: Fact | None = None
    """Bias of the last matrix; None for the same."""
    norms: str = ""
    """Norms of queries and keys: of each ``head`` with one weight, of ``each head`` with its own,
    as a ``list`` of modules, of all heads as a ``whole``, ``weightless``, or none."""
    has_norms: Fact = True
    norm_names: tuple[str, str] = ("q_norm", "k_norm")
    path: str = "self_attn"
    output: str = "o_proj"
    joined: str = ""
    """Name of the one matrix of queries, keys and values, if they have one."""

    def __call__(self, config: Config) -> LayerShape:
        hidden, heads = config.count("hidden_size"), config.count("num_attention_heads")
        if self.head_dim and config.get(self.head_dim) is not None:
            dim = config.count(self.head_dim)
        else:
            dim = config.share("hidden_size", "num_attention_heads")
        groups = heads
        if config.get("num_key_value_heads") is not None:
            groups //= config.share("num_attention_heads", "num_key_value_heads")
        queries, keys, bias = heads * dim, groups * dim, config.holds(self.bias)
        sides = {"q_proj": queries, "k_proj": keys, "v_proj": keys}
        if self.joined:
            sides = {self.joined: queries + 2 * keys}
        linears = {
            f"{self.path}.{name}": Linear("attention", hidden, outputs, bias)
            for name, outputs in sides.items()
        }
        output_bias = bias if self.output_bias is None else config.holds(self.output_bias)
        linears[f"{self.path}.{self.output}"] = Linear("values", queries, hidden, output_bias)
        norms: dict[str, Norm] = {}
        has_norms = self.norms and config.holds(self.has_norms)
        for name, count in zip(self.norm_names, (heads, groups), strict=True) if has_norms else ():
            norms |= self._norms(f"{self.path}.{name}", count, dim)
        kept = queries + keys if has_norms and self.norms == "weightless" else 0
        joined = queries + keys if self.joined else 0
        return LayerShape(
            linears=tuple(linears.items()),
            norms=tuple(norms.items()),
            heads=Heads(heads, groups, dim, dim, 2 * keys, joined),
            kept=kept,
        )

    def _norms(self, path: str, heads: int, dim: int) -> dict[str, Norm]:
        size = heads * dim
        if self.norms == "list":
            return {f"{path}.{i}": Norm(dim, dim) for i in range(heads)}
        kinds = {
            "head": Norm(dim, size),
            "each head": Norm(dim, size, heads=heads),
            "whole": Norm(size, size),
        }
        return {path: kinds[self.norms]} if self.norms in kinds else {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Latent:
    """Columns of multi-head latent attention (arXiv:2405.04434).

    If ``absorbed``, a matrix for each head makes keys and values of the latent state, and the cache
    keeps the latent state and one rotary key. If not, one linear layer makes them all, and the
    cache keeps keys and values.
    """

    absorbed: bool = True

    def __call__(self, config: Config) -> LayerShape:
        hidden, heads = config.count("hidden_size"), config.count("num_attention_heads")
        latent, rotary = config.count("kv_lora_rank"), config.count("qk_rope_head_dim")
        plain, values = config.count("qk_nope_head_dim"), config.count("v_head_dim")
        bias, path = config.holds("attention_bias"), "self_attn"
        key = plain + rotary
        linears: dict[str, Linear] = {}
        norms = {f"{path}.kv_a_layernorm": Norm(latent, latent)}
        if config.fields.get("q_lora_rank", 0) is None:
            linears[f"{path}.q_proj"] = Linear("attention", hidden, heads * key)
        else:
            rank = config.count("q_lora_rank")
            linears[f"{path}.q_a_proj"] = Linear("attention", hidden, rank, bias)
            linears[f"{path}.q_b_proj"] = Linear("latent queries", rank, heads * key)
            norms[f"{path}.q_a_layernorm"] = Norm(rank, rank)
        linears[f"{path}.kv_a_proj_with_mqa"] = Linear("attention", hidden, latent + rotary, bias)
        if self.absorbed:
            # The matrix of queries is transposed.
            for name, inputs, outputs, size in (
                ("embed_q", plain, latent, plain),
                ("unembed_out", latent, values, values),
            ):
                linears[f"{path}.{name}"] = Linear(
                    "latent",
                    inputs,
                    outputs,
                    experts=heads,
                    uses=heads,
                    applied=(latent, heads * size),
                )
        else:
            linears[f"{path}.kv_b_proj"] = Linear("latent", latent, heads * (plain + values))
        linears[f"{path}.o_proj"] = Linear("values", heads * values, hidden, bias)
        cached = latent + rotary if self.absorbed else heads * (key + values)
        # Values cut from one layer's output keep all of it.
        joined = 0 if self.absorbed else heads * plain
        return LayerShape(
            linears=tuple(linears.items()),
            norms=tuple(norms.items()),
            heads=Heads(heads, heads, key, values, cached, joined),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Dense:
    """Columns of an MLP that every token passes: gated, or of two matrices."""

    width: str = "intermediate_size"
    path: str = "mlp"
    names: tuple[str, ...] = GATED
    """Names of the matrices: gate, up and down, or up and down."""
    is_joined: bool = False
    """True if the first matrix is gate and up in one."""
    bias: Fact = False

    def __call__(self, config: Config, source: str = "mlp", width: int = 0) -> LayerShape:
        hidden, bias = config.count("hidden_size"), config.holds(self.bias)
        width = width or config.count(self.width)
        *ups, down = self.names
        linears = {
            f"{self.path}.{up}": Linear(source, hidden, width * (1 + self.is_joined), bias)
            for up in ups
        }
        has_gate = self.is_joined or len(ups) > 1
        product = f"{'product' if has_gate else 'activations'} of {self.path}"
        linears[f"{self.path}.{down}"] = Linear(product, width, hidden, bias)
        return LayerShape(linears=tuple(linears.items()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """Columns of gated MLPs of which a router chooses some for each token, beside shared ones
    (arXiv:2401.06066).

    Hugging Face stores each as ``PATH.experts.NUMBER.NAME`` with the ``names``, or stacks them as
    mlx-lm does, if there are no names.
    """

    count: str
    """Field with their number."""
    used: str = "num_experts_per_tok"
    """Field with the number of those that a token passes."""
    width: str = "moe_intermediate_size"
    path: str = "mlp"
    stack: str = "switch_mlp"
    names: tuple[str, ...] = GATED
    bias: Fact = False
    router: str = "gate"
    router_bias: bool = False
    router_is_array: bool = False
    """True if mlx-lm keeps the router as an array, which has neither quantisation nor adapters."""
    correction: str = ""
    """Path of the numbers that are added to the scores for the choice, one for each expert."""
    shared: str = ""
    """Field with the number of shared experts."""
    shared_width: str = ""
    """Field with the width of a shared expert, if it has another one than the rest."""
    shared_path: str = "shared_experts"
    has_shared_gate: bool = False
    """True for one shared expert, whose answer a gate weights."""

    def __call__(self, config: Config) -> LayerShape:
        hidden, path, bias = config.count("hidden_size"), self.path, config.holds(self.bias)
        width = config.count(self.width)
        number, active = config.count(self.count), config.count(self.used)
        if active > number:
            raise UserError(
                f"config.json: {self.used} {active} is more than {self.count} {number}", AGAIN
            )
        linears: dict[str, Linear] = {}
        arrays: dict[str, tuple[int, ...]] = {}
        if self.router_is_array:
            arrays[f"{path}.{self.router}.weight"] = (number, hidden)
        else:
            linears[f"{path}.{self.router}"] = Linear("mlp", hidden, number, self.router_bias)
        if self.correction:
            arrays[f"{path}.{self.correction}"] = (number,)
        for i, name in enumerate(GATED):
            is_down = name == GATED[-1]
            linears[f"{path}.{self.stack}.{name}"] = Linear(
                "product" if is_down else "experts",
                width if is_down else hidden,
                hidden if is_down else width,
                bias,
                number,
                active,
                f"{path}.experts.{{}}.{self.names[i]}" if self.names else "",
            )
        shared_path, shared = f"{path}.{self.shared_path}", int(self.has_shared_gate)
        if self.shared:
            shared = config.number(self.shared)
        if shared:
            own = config.number(self.shared_width) or width
            linears |= dict(Dense(path=shared_path, bias=bias)(config, width=shared * own).linears)
        if self.has_shared_gate:
            linears[f"{shared_path}_gate"] = Linear("mlp", hidden, 1)
        return LayerShape(
            linears=tuple(linears.items()),
            arrays=tuple(arrays.items()),
            # The answer of a shared expert, before its gate.
            kept=hidden * self.has_shared_gate,
        )
