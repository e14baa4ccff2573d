"""Blocks of large mixtures of experts, which several families have in common. No MLX, no MPI.

Latent attention (arXiv:2405.04434), and dense layers before those of many routed experts, beside
which some are shared (arXiv:2401.06066).
"""

from __future__ import annotations

from shardmlx.errors import UserError
from shardmlx.models.config_reader import AGAIN, Config
from shardmlx.models.layer_shape import (
    MLP,
    Attention,
    Block,
    Heads,
    LayerShape,
    Linear,
    Norm,
    layer_of,
    swiglu,
)


def expert_mlps(
    config: Config,
    width: int,
    count: str,
    used: str,
    *,
    path: str = "mlp",
    stack: str = "switch_mlp",
    stored: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj"),
    bias: bool = False,
    router: str = "gate",
    router_bias: bool = False,
    router_is_array: bool = False,
    correction: str = "",
) -> MLP:
    """Return the gated MLPs, their number in the field ``count``, and their router; the field
    ``used`` has the number that a token passes through.

    Hugging Face ``stored`` each as ``PATH.experts.NUMBER.NAME``, or stacks them as mlx-lm does
    (then no names are given). A ``router_is_array`` without quantisation or adapters, or a linear
    layer. ``correction`` is the path of numbers added to the scores for the choice, one for each
    expert.
    """
    hidden, number, active = config.count("hidden_size"), config.count(count), config.count(used)
    if active > number:
        raise UserError(f"config.json: {used} {active} is more than {count} {number}", AGAIN)
    linears: dict[str, Linear] = {}
    arrays: dict[str, tuple[int, ...]] = {}
    if router_is_array:
        arrays[f"{path}.{router}.weight"] = (number, hidden)
    else:
        linears[f"{path}.{router}"] = Linear("mlp", hidden, number, router_bias)
    if correction:
        arrays[f"{path}.{correction}"] = (number,)
    sides = {"gate_proj": (hidden, width), "up_proj": (hidden, width), "down_proj": (width, hidden)}
    theirs = [f"{path}.experts.{{}}.{name}" for name in stored] or [""] * len(sides)
    for (name, (inputs, outputs)), single in zip(sides.items(), theirs, strict=True):
        source = "product" if name == "down_proj" else "experts"
        linears[f"{path}.{stack}.{name}"] = Linear(
            source, inputs, outputs, bias, number, active, single
        )
    return MLP(Block(linears, arrays=arrays), width * active, number, active)


def with_shared(mlp: MLP, shared: MLP) -> MLP:
    """Return experts and a ``shared`` MLP that every token passes."""
    block = Block(
        {**mlp.block.linears, **shared.block.linears},
        {**mlp.block.norms, **shared.block.norms},
        {**mlp.block.arrays, **shared.block.arrays},
    )
    return MLP(block, mlp.width + shared.width, mlp.experts, mlp.experts_per_token, mlp.passing)


def latent_attention(config: Config, *, absorbed: bool) -> Attention:
    """Return multi-head latent attention.

    If ``absorbed``, a matrix for each head makes keys and values of the latent state, and the cache
    keeps the latent state and one rotary key. If not, one linear layer makes them all, and the
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
        # A matrix for each head, from the same latent state; transposed for queries.
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
    # Values cut from one layer's output keep all of it.
    joined = 0 if absorbed else heads * plain
    return Attention(Block(linears, norms), Heads(heads, heads, key, values, cached, joined))


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
