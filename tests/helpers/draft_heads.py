"""Tiny models with a head for further tokens, in files with the names of those who publish them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models.base import create_attention_mask

from shardmlx.models.families import HEADS
from shardmlx.models.runtime.draft_head import ONE_LAYER
from testbed.family_configs import CONFIGS
from testbed.tiny_models import build

LAYERS = 4

Weights = dict[str, mx.array]


def head_config(family: str, **changes: Any) -> dict[str, Any]:
    own = {"num_hidden_layers": LAYERS, "moe_layer_freq": 1}
    # A thread could not use frequencies that another has computed.
    return {**CONFIGS[family], **own, "rope_scaling": None, **changes}


def _published(weights: Mapping[str, mx.array]) -> Iterator[tuple[str, mx.array]]:
    """Yield tensors as files have them: experts one by one, keys and values of a latent as one."""
    for name, array in weights.items():
        path, _, last = name.partition("embed_q.")
        before, is_expert, after = name.partition(".switch_mlp.")
        if is_expert:
            yield from ((f"{before}.experts.{i}.{after}", each) for i, each in enumerate(array))
        elif last:
            values = weights[f"{path}unembed_out.weight"]
            both = mx.concatenate([array.swapaxes(-1, -2), values], axis=1)
            yield f"{path}kv_b_proj.weight", both.flatten(0, 1)
        elif "unembed_out." not in name:
            yield name, array


def save_with_head(
    path: Path, config: Mapping[str, Any], *, noise: float | None = None, bits: int | None = None
) -> Path:
    """Write a random model with a random head. With ``noise`` each token decides the next one, and
    the head knows it but for so much noise. The head's matrices are in ``bits``."""
    family, layers = config["model_type"], config["num_hidden_layers"]
    names, width = HEADS[family], config["hidden_size"]
    prefix = names.prefix.format(layers)
    plain = {key: each for key, each in config.items() if key != "quantization"}
    model = dict(tree_flatten(build(plain).parameters()))
    alone = dict(tree_flatten(build({**plain, **ONE_LAYER}, seed=2).parameters()))
    of_layer = {name: each for name, each in alone.items() if name.startswith("model.layers.0.")}
    mx.random.seed(3)
    projection = 0.2 * mx.random.normal((width, 2 * width))
    if noise is not None:
        _follow(model)
        token = mx.eye(width, 2 * width, k=width if names.states_first else 0)
        projection = token + noise * projection
    own = {
        prefix + name.removeprefix("model.layers.0."): each for name, each in _published(of_layer)
    }
    own |= {
        f"{prefix}{names.projection}.weight": projection,
        **{
            f"{prefix}{norm}.weight": 1 + 0.2 * mx.random.normal((width,))
            for norm in (names.token_norm, names.state_norm, names.final_norm)
        },
    }
    if bits is not None:
        own = dict(_packed(own, bits))
    if family != "mimo":
        own[f"{prefix}embed_tokens.weight"] = model["model.embed_tokens.weight"]
        own[f"{prefix}shared_head.head.weight"] = model["lm_head.weight"]
    path.mkdir(parents=True)
    mx.save_safetensors(str(path / "model.safetensors"), {**dict(_published(model)), **own})
    (path / "config.json").write_text(json.dumps(dict(config)))
    return path


def without_head(path: Path, directory: Path) -> Path:
    """Write the files again without the head, into another directory."""
    directory.mkdir()
    stored: Any = mx.load(str(path / "model.safetensors"))
    prefixes = f"model.layers.{LAYERS}.", "model.mtp_layers."
    kept = {name: each for name, each in stored.items() if not name.startswith(prefixes)}
    mx.save_safetensors(str(directory / "model.safetensors"), kept)
    (directory / "config.json").write_bytes((path / "config.json").read_bytes())
    return directory


def _follow(model: Weights) -> None:
    """Let the layers pass on what was embedded, and a head find the token after it."""
    embedding = mx.random.normal(model["model.embed_tokens.weight"].shape)
    model["model.embed_tokens.weight"] = embedding / mx.linalg.norm(
        embedding, axis=-1, keepdims=True
    )
    model["lm_head.weight"] = mx.roll(model["model.embed_tokens.weight"], 1, 0)
    for name in model:
        if "o_proj." in name or "down_proj." in name:
            model[name] = 0.02 * model[name]


def _packed(own: Weights, bits: int) -> Iterator[tuple[str, mx.array]]:
    for name, array in own.items():
        if array.ndim < 2 or name.endswith("gate.weight"):
            yield name, array
            continue
        path = name.removesuffix(".weight")
        parts = zip(("weight", "scales", "biases"), mx.quantize(array, 32, bits), strict=True)
        yield from ((f"{path}.{part}", each) for part, each in parts)


def guess_by_formula(path: Path, model: nn.Module, text: list[int], count: int) -> list[int]:
    """The tokens that the head in the files guesses to follow a text, computed from its beginning
    for each; ``model`` is mlx-lm's."""
    config = json.loads((path / "config.json").read_text())
    names, width = HEADS[config["model_type"]], config["hidden_size"]
    files: Any = mx.load(str(path / "model.safetensors"))
    prefix = names.prefix.format(config["num_hidden_layers"])
    alone = build({**config, **ONE_LAYER})
    layer = {n.removeprefix(prefix): a for n, a in files.items() if n.startswith(prefix)}
    weights = alone.sanitize({f"model.layers.0.{name}": each for name, each in layer.items()})
    alone.load_weights([*weights.items()], strict=False)

    def norm(name: str, x: mx.array) -> mx.array:
        return mx.fast.rms_norm(x, layer[f"{name}.weight"], config["rms_norm_eps"])

    body = model.model
    head, final = model.lm_head, body["norm"]
    body["norm"] = lambda x: x
    states = body(mx.array([text[:-1]]))
    body["norm"] = final
    if config["model_type"] != "mimo":
        states = final(states)
    guessed: list[int] = []
    for _ in range(count):
        tokens = body.embed_tokens(mx.array([[*text, *guessed][1:]]))
        pair = [norm(names.token_norm, tokens), norm(names.state_norm, states)]
        if config["model_type"] == "mimo":
            pair.reverse()
        x = mx.concatenate(pair, axis=-1) @ layer[f"{names.projection}.weight"].T
        assert x.shape[-1] == width
        mask = create_attention_mask(x, None, return_array=True)
        out = norm(names.final_norm, alone.layers[0](x, mask, None)[:, -1:])
        states = mx.concatenate([states, out], axis=1)
        guessed.append(int(np.array(mx.argmax(head(out)))))
    return guessed
