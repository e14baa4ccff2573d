"""Families whose layers have one MLP each, and wrappers around a text model.

A row says what differs from Llama's layers, and the few facts that tensors do not tell.
"""

from __future__ import annotations

from dataclasses import replace

from shardmlx.models.blocks import Dense, Grouped
from shardmlx.models.family import Family
from shardmlx.models.layer_kinds import windows_by_period, windows_by_type
from shardmlx.models.layer_shape import GELU, GELU_APPROX, JOINED_SWIGLU, Activation

# Places of norms beside those of Llama.
BEHIND = ("post_attention_layernorm", "post_feedforward_layernorm")
AROUND = ("input_layernorm", BEHIND[0], "pre_feedforward_layernorm", BEHIND[1])

PLAIN = Grouped(head_dim="")
QKV_BIASED = Grouped(head_dim="", bias=True, output_bias=False)
BIASED = Grouped(bias="attention_bias")
HEAD_NORMS = Grouped(norms="head")
GLM = Family(
    attention=Grouped(bias="attention_bias", output_bias=False),
    mlp=Dense(names=("gate_up_proj", "down_proj"), is_joined=True),
    activation=JOINED_SWIGLU,
)
BIASED_MLP = Dense(bias="mlp_bias")

LLAMA = Family(attention=BIASED, mlp=BIASED_MLP, windows=windows_by_type(), has_gguf=True)

FAMILIES = {
    "llama": LLAMA,
    "mistral": LLAMA,
    "smollm3": Family(attention=BIASED, mlp=BIASED_MLP),
    "qwen2": Family(attention=QKV_BIASED),
    "qwen3": Family(attention=HEAD_NORMS, tied="as said"),
    "ministral3": Family(
        windows=windows_by_type(),
        # Scales of weights in fp8, which mlx-lm multiplies in.
        dropped=r"activation_scale|weight_scale_inv",
    ),
    "apertus": Family(
        attention=Grouped(head_dim="", norms="head"),
        mlp=Dense(names=("up_proj", "down_proj"), bias="mlp_bias"),
        norms=("attention_layernorm", "feedforward_layernorm"),
        arrays={f"mlp.act_fn.{name}": () for name in ("alpha_n", "alpha_p", "beta", "eps")},
        # The gradients of alpha sum over as many numbers.
        activation=Activation(0.35, passing=4, weights=(2, 4)),
        tied="as said",
    ),
    "cohere": Family(
        attention=Grouped(
            head_dim="", bias="attention_bias", norms="each head", has_norms="use_qk_norm"
        ),
        is_parallel=True,
        only=("layer_norm_bias",),
        tied="always",
    ),
    "cohere2": Family(
        attention=BIASED,
        windows=windows_by_period,
        is_parallel=True,
        only=("layer_norm_bias",),
        defaults={
            "head_dim": 128,
            "num_key_value_heads": 8,
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
        },
        tied="always",
    ),
    "gemma": Family(activation=GELU, tied="always"),
    # mlx-lm ignores the windows of every other layer.
    "gemma2": Family(
        norms=AROUND,
        activation=GELU_APPROX,
        # Probabilities, and the tanh of scores.
        scores=2,
        tied="always",
        takes_pieces=False,
        # mlx-lm mistakes the rows of a batch's mask for heads.
        takes_batches=False,
    ),
    "gemma3_text": Family(
        attention=HEAD_NORMS,
        windows=windows_by_period,
        norms=AROUND,
        activation=GELU_APPROX,
        defaults={
            "head_dim": 256,
            "num_key_value_heads": 1,
            "sliding_window": 512,
            "sliding_window_pattern": 6,
        },
    ),
    "glm": GLM,
    "glm4": replace(
        GLM,
        norms=(
            "input_layernorm",
            "post_self_attn_layernorm",
            "post_attention_layernorm",
            "post_mlp_layernorm",
        ),
        tied="never",
    ),
    "granite": Family(attention=Grouped(head_dim="", bias="attention_bias"), mlp=BIASED_MLP),
    "helium": Family(
        attention=Grouped(head_dim="", bias="attention_bias", output_bias=False),
        mlp=BIASED_MLP,
        # mlx-lm gives a tied model an lm_head as well, which it loads and ignores.
        only=("tie_word_embeddings",),
        tied="as said",
    ),
    "hunyuan_v1_dense": Family(
        attention=Grouped(
            bias="attention_bias",
            norms="head",
            has_norms="use_qk_norm",
            norm_names=("query_layernorm", "key_layernorm"),
        ),
        defaults={"use_qk_norm": True},
        tied="if said",
    ),
    "llama4_text": Family(
        attention=Grouped(norms="weightless", has_norms="use_qk_norm"),
        mlp=Dense(width="intermediate_size_mlp", path="feed_forward"),
        tied="as said",
        head="output",
    ),
    # mlx-lm adds an lm_head to the tensors of a tied model, and then refuses it.
    "minicpm": Family(attention=PLAIN, only=("tie_word_embeddings",), tied="if said"),
    "nemotron": Family(
        attention=BIASED,
        mlp=Dense(names=("up_proj", "down_proj"), bias="mlp_bias"),
        norm_bias=True,
        activation=Activation(0),
        tied="if said",
    ),
    "phi": Family(
        attention=Grouped(head_dim="", bias=True, output="dense"),
        mlp=Dense(names=("fc1", "fc2"), bias=True),
        is_parallel=True,
        norm_bias=True,
        activation=Activation(2),
        tied="never",
        final_norm="final_layernorm",
        head_has_bias=True,
    ),
    "phi3": replace(GLM, attention=Grouped(head_dim="", joined="qkv_proj"), tied="if said"),
    "stablelm": Family(
        attention=Grouped(
            head_dim="",
            bias="use_qkv_bias",
            output_bias=False,
            norms="list",
            has_norms="qk_layernorm",
            norm_names=("q_layernorm.norms", "k_layernorm.norms"),
        ),
        is_parallel="use_parallel_residual",
        norm_bias=True,
        tied="never",
    ),
    "starcoder2": Family(
        attention=Grouped(head_dim="", bias=True),
        mlp=Dense(names=("c_fc", "c_proj"), bias=True),
        norm_bias=True,
        activation=Activation(1),
        defaults={"vocab_size": 49152},
    ),
    # Text models beside a vision tower, which mlx-lm ignores.
    "gemma3": Family(
        defaults={"num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 262208},
        dropped=r"^vision_tower\.|^multi_modal_projector\.",
        windows=windows_by_period,
        text_default="gemma3_text",
        text_takes=("vocab_size",),
    ),
    "kimi_k25": Family(
        dropped=r"vision_tower|vision_model|mm_projector|multi_modal_projector",
        text_default="deepseek_v3",
    ),
    "mistral3": Family(
        tied="if said",
        dropped=r"vision_tower|multi_modal_projector",
        text_types=("ministral3", "mistral4"),
        text_default="llama",
        renames=(
            ("model.language_model.", "language_model.model."),
            ("model.", "language_model.model."),
            ("lm_head.", "language_model.lm_head."),
        ),
    ),
}
