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

    takes_head_dim: bool = True
    """False if mlx-lm ignores ``head_dim``: a head then has hidden size by heads."""
    bias: Fact = False
    output_bias: Fact | None = None
    """Bias of the last matrix; None for the same."""
    has_norms: Fact = False
    """True if each head of queries and keys is normed, all with one weight."""

    def __call__(self, config: Config) -> LayerShape:
        hidden, heads = config.count("hidden_size"), config.count("num_attention_heads")
        if self.takes_head_dim and config.get("head_dim") is not None:
            dim = config.count("head_dim")
        else:
            dim = config.share("hidden_size", "num_attention_heads")
        groups = heads
        if config.get("num_key_value_heads") is not None:
            groups //= config.share("num_attention_heads", "num_key_value_heads")
        queries, keys, bias = heads * dim, groups * dim, config.holds(self.bias)
        output_bias = bias if self.output_bias is None else config.holds(self.output_bias)
        linears = {
            "self_attn.q_proj": Linear("attention", hidden, queries, bias),
            "self_attn.k_proj": Linear("attention", hidden, keys, bias),
            "self_attn.v_proj": Linear("attention", hidden, keys, bias),
            "self_attn.o_proj": Linear("values", queries, hidden, output_bias),
        }
        norms = {"self_attn.q_norm": Norm(dim, queries), "self_attn.k_norm": Norm(dim, keys)}
        return LayerShape(
            linears=tuple(linears.items()),
            norms=tuple(norms.items()) if config.holds(self.has_norms) else (),
            heads=Heads(heads, groups, dim, dim, 2 * keys),
        )


def latent(config: Config) -> LayerShape:
    """Return multi-head latent attention (arXiv:2405.04434): a matrix for each head makes keys and
    values of the latent state, and the cache keeps this and one rotary key."""
    hidden, heads = config.count("hidden_size"), config.count("num_attention_heads")
    size, rotary = config.count("kv_lora_rank"), config.count("qk_rope_head_dim")
    plain, values = config.count("qk_nope_head_dim"), config.count("v_head_dim")
    bias, path = config.holds("attention_bias"), "self_attn"
    key = plain + rotary
    linears: dict[str, Linear] = {}
    norms = {f"{path}.kv_a_layernorm": Norm(size, size)}
    if config.fields.get("q_lora_rank", 0) is None:
        linears[f"{path}.q_proj"] = Linear("attention", hidden, heads * key)
    else:
        rank = config.count("q_lora_rank")
        linears[f"{path}.q_a_proj"] = Linear("attention", hidden, rank, bias)
        linears[f"{path}.q_b_proj"] = Linear("latent queries", rank, heads * key)
        norms[f"{path}.q_a_layernorm"] = Norm(rank, rank)
    linears[f"{path}.kv_a_proj_with_mqa"] = Linear("attention", hidden, size + rotary, bias)
    # The matrix of queries is transposed.
    for name, inputs, outputs, own in (
        ("embed_q", plain, size, plain),
        ("unembed_out", size, values, values),
    ):
        linears[f"{path}.{name}"] = Linear(
            "latent", inputs, outputs, experts=heads, uses=heads, applied=(size, heads * own)
        )
    linears[f"{path}.o_proj"] = Linear("values", heads * values, hidden, bias)
    return LayerShape(
        linears=tuple(linears.items()),
        norms=tuple(norms.items()),
        heads=Heads(heads, heads, key, values, size + rotary),
    )


def gated_mlp(
    config: Config, width: int = 0, path: str = "mlp", bias: bool = False
) -> dict[str, Linear]:
    """Return the matrices of a gated MLP, which every token passes."""
    hidden, width = config.count("hidden_size"), width or config.count("intermediate_size")
    return {
        f"{path}.gate_proj": Linear("mlp", hidden, width, bias),
        f"{path}.up_proj": Linear("mlp", hidden, width, bias),
        f"{path}.down_proj": Linear(f"product of {path}", width, hidden, bias),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """Columns of gated MLPs of which a router chooses some for each token, beside shared ones
    (arXiv:2401.06066).

    Hugging Face stores each as ``PATH.experts.NUMBER.NAME`` with the ``names``, or stacks them as
    mlx-lm does, if there are no names.
    """

    count: str
    """Field with their number."""
    width: str = "moe_intermediate_size"
    path: str = "mlp"
    stack: str = "switch_mlp"
    names: tuple[str, ...] = GATED
    bias: bool = False
    router: str = "gate"
    router_is_array: bool = False
    """True if mlx-lm keeps the router as an array, which has neither quantisation nor adapters."""
    is_corrected: bool = False
    """True if numbers are added to the scores for the choice, one for each expert."""
    shared: str = ""
    """Field with the number of shared experts."""

    def __call__(self, config: Config) -> LayerShape:
        hidden, path, width = config.count("hidden_size"), self.path, config.count(self.width)
        number, active = config.count(self.count), config.count("num_experts_per_tok")
        if active > number:
            raise UserError(
                f"config.json: num_experts_per_tok {active} is more than {self.count} {number}",
                AGAIN,
            )
        linears: dict[str, Linear] = {}
        arrays: dict[str, tuple[int, ...]] = {}
        router = f"{path}.{self.router}"
        if self.router_is_array:
            arrays[f"{router}.weight"] = (number, hidden)
        else:
            linears[router] = Linear("mlp", hidden, number, self.bias)
        if self.is_corrected:
            arrays[f"{router}.e_score_correction_bias"] = (number,)
        for i, name in enumerate(GATED):
            is_down = name == GATED[-1]
            linears[f"{path}.{self.stack}.{name}"] = Linear(
                "product" if is_down else "experts",
                width if is_down else hidden,
                hidden if is_down else width,
                self.bias,
                number,
                active,
                f"{path}.experts.{{}}.{self.names[i]}" if self.names else "",
            )
        if shared := config.number(self.shared) if self.shared else 0:
            linears |= gated_mlp(config, shared * width, f"{path}.shared_experts")
        return LayerShape(linears=tuple(linears.items()), arrays=tuple(arrays.items()))
