"""Blocks of large mixtures of experts, which several families have in common. No MLX, no MPI.

Latent attention (arXiv:2405.04434), and dense layers before those of many routed experts, beside
which some are shared (arXiv:2401.06066).
"""

from __future__ import annotations

from shardmlx.models.config_reader import Config
from shardmlx.models.layer_shape import (
    Attention,
    Block,
    Heads,
    LayerShape,
    Linear,
    Norm,
    expert_mlps,
    layer_of,
    swiglu,
    with_shared,
)


def latent_attention(config: Config, *, absorbed: bool) -> Attention:
    """Return multi-head latent attention.

    ``absorbed``: what makes keys and values of the latent state is a matrix for each head, and the
    cache keeps the latent state and one rotary key. Else one linear layer makes them all, and the
    cache keeps keys and values.
    """
    hidden, heads = config.count("hidden_size"), config.count("num_attention_heads")
    latent, rotary = config.count("kv_lora_rank"), config.count("qk_rope_head_dim")
    plain, values = config.count("qk_nope_head_dim"), config.count("v_head_dim")
    bias, path = config.switch("attention_bias", False), "self_attn"
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
    if absorbed:
        # A matrix for each head, all of the same latent state; of queries the other way round.
        linears[f"{path}.embed_q"] = Linear(
            "latent", plain, latent, experts=heads, uses=heads, applied=(latent, heads * plain)
        )
        linears[f"{path}.unembed_out"] = Linear(
            "latent", latent, values, experts=heads, uses=heads, applied=(latent, heads * values)
        )
    else:
        linears[f"{path}.kv_b_proj"] = Linear("latent", latent, heads * (plain + values))
    linears[f"{path}.o_proj"] = Linear("values", heads * values, hidden, bias)
    cached = latent + rotary if absorbed else heads * (key + values)
    return Attention(Block(linears, norms), Heads(heads, heads, key, values, cached))


def routed_layers(
    config: Config,
    attention: Attention,
    *,
    stack: str = "switch_mlp",
    router_is_array: bool = True,
    correction: str = "gate.e_score_correction_bias",
) -> list[LayerShape]:
    """Return ``first_k_dense_replace`` dense layers, and then layers of ``n_routed_experts`` beside
    ``n_shared_experts``, or every ``moe_layer_freq``-th of them."""
    hidden, count = config.count("hidden_size"), config.count("num_hidden_layers")
    dense = layer_of(hidden, attention, swiglu(hidden, config.count("intermediate_size")))
    if config.get("n_routed_experts") is None:
        return [dense] * count
    width = config.count("moe_intermediate_size")
    mlp = expert_mlps(
        config,
        width,
        "n_routed_experts",
        "num_experts_per_tok",
        stack=stack,
        router_is_array=router_is_array,
        correction=correction,
    )
    if config.get("n_shared_experts") is not None:
        shared = width * config.count("n_shared_experts")
        mlp = with_shared(mlp, swiglu(hidden, shared, path="mlp.shared_experts"))
    sparse = layer_of(hidden, attention, mlp)
    first, every = config.number("first_k_dense_replace", 0), config.count("moe_layer_freq", 1)
    return [sparse if i >= first and i % every == 0 else dense for i in range(count)]
