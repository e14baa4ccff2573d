"""Write logits of transformers for tiny models with each kind of rotary embedding, for the tests.

Run it where torch and transformers are installed, which the tests need not:
python -m testbed.make_rope_logits tests/helpers/rope_logits.json
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.numpy import load_file, save_file
from transformers import AutoConfig

from testbed.seeded_weights import SHOWN, TOKENS, seeded_weight

TINY = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "intermediate_size": 48,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": 16,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
KINDS = ["sliding_attention", "full_attention"]
WINDOWED = {"layer_types": KINDS, "sliding_window": 8}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": None},
    "qwen2": {},
    "qwen3": {},
    # mlx-lm rounds the root of the hidden size to bfloat16: that of 64 it need not.
    "gemma3_text": {**WINDOWED, "hidden_size": 64, "query_pre_attn_scalar": 16},
    "phi3": {},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "glm4": {},
    "cohere": {"tie_word_embeddings": True},
    "glm": {},
    "olmo3": WINDOWED,
}
TRAINED = {"original_max_position_embeddings": 16}
FORMS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        **TRAINED,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, **TRAINED},
    "yarn with a weight": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.3, **TRAINED},
    "yarn with a scale": {"rope_type": "yarn", "factor": 4.0, "mscale": 0.5, **TRAINED},
}
ONLY = {"phi3": ("default",), "glm": ("default",), "glm4": ("default",)}
"""Families that transformers itself, or mlx-lm, has without the others."""


def main(path: Path) -> None:
    """Write the file."""
    cases = []
    for family, own in FAMILIES.items():
        for form, rope in FORMS.items():
            if form in ONLY.get(family, FORMS) and ("with" not in form or family == "llama"):
                cases.append({"form": form, **case(family, {**TINY, **own}, rope)})
    versions = {"transformers": transformers.__version__, "torch": torch.__version__}
    lines = ",\n".join(json.dumps(each) for each in cases)
    path.write_text(f'{{"versions": {json.dumps(versions)}, "cases": [\n{lines}\n]}}\n')


def case(family: str, fields: dict[str, Any], rope: dict[str, Any]) -> dict[str, Any]:
    """Return the config.json that transformers writes of a model, and its logits."""
    said: dict[str, Any] = {"rope_theta": 500.0, **rope}
    if family in ("glm", "glm4"):
        said["partial_rotary_factor"] = 0.5
    if fields.get("layer_types"):
        local = {"rope_type": "default", "rope_theta": 50.0 if family == "gemma3_text" else 500.0}
        said = dict(zip(KINDS, (local, said), strict=True))
    config = AutoConfig.for_model(family, rope_parameters=said, **fields)
    with tempfile.TemporaryDirectory() as directory:
        auto: Any = transformers.AutoModelForCausalLM
        auto.from_config(config).save_pretrained(directory)
        file = Path(directory) / "model.safetensors"
        tensors = {name: seeded_weight(name, each.shape) for name, each in load_file(file).items()}
        save_file(tensors, file, {"format": "pt"})
        model = auto.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
        with torch.no_grad():
            logits = model(torch.tensor([TOKENS])).logits[0].numpy()
        written = json.loads((Path(directory) / "config.json").read_text())
    kept = np.round(logits[list(SHOWN)].astype(float), 6)
    return {"config": written, "logits": kept.tolist()}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
