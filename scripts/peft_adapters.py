"""Compares adapters with PEFT on torch, which pip install torch peft brings.

    python scripts/peft_adapters.py make           # writes tests/helpers/peft anew
    python scripts/peft_adapters.py compare MODEL ADAPTERS LOGITS

``make`` trains nothing: it lets PEFT save adapters of random numbers of a tiny model, with the
logits that PEFT computes. ``compare`` loads adapters that ``shardmlx export --peft`` wrote, and
compares PEFT's logits of the tokens with those in a safetensors file (``tokens``, ``logits``).
"""

import argparse
import json
import shutil
import sys
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

PLACE = Path(__file__).parents[1] / "tests/helpers/peft"

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]

CASES = {
    "lora": {"r": 4, "lora_alpha": 6, "target_modules": ATTENTION},
    "rslora": {"r": 4, "lora_alpha": 6, "target_modules": ["q_proj"], "use_rslora": True},
    "dora": {"r": 2, "lora_alpha": 3, "target_modules": "all-linear", "use_dora": True},
    "patterns": {
        "r": 2,
        "lora_alpha": 4,
        "target_modules": ["q_proj", "down_proj", "lm_head"],
        "rank_pattern": {"down_proj": 3},
        "alpha_pattern": {r"layers\.1\.self_attn\.q_proj": 7},
    },
    "embedding": {"r": 2, "lora_alpha": 4, "target_modules": ["embed_tokens"]},
    "one-layer": {"r": 2, "target_modules": ["v_proj"], "layers_to_transform": [1]},
    "saved-modules": {"r": 2, "target_modules": ["v_proj"], "modules_to_save": ["lm_head"]},
    "bias": {"r": 2, "target_modules": ["v_proj"], "bias": "all"},
}
"""Settings of PEFT's LoRA; those of the last two have no form in mlx-lm."""


def scatter(model: torch.nn.Module, size: float) -> None:
    """Set all weights that are trained to random numbers, magnitudes to nearly their own."""
    for name, weight in model.named_parameters():
        if weight.requires_grad:
            noise = size * torch.randn_like(weight)
            is_magnitude = "magnitude" in name
            weight.data = weight.data * (1 + noise) if is_magnitude else noise


def make() -> None:
    """Write the model, adapters and logits of each case."""
    torch.manual_seed(3)
    shutil.rmtree(PLACE, ignore_errors=True)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        attention_bias=True,
        tie_word_embeddings=False,
        initializer_range=0.2,
    )
    LlamaForCausalLM(config).save_pretrained(PLACE / "model")
    tokens = torch.randint(0, config.vocab_size, (2, 7))
    for name, settings in CASES.items():
        model = AutoModelForCausalLM.from_pretrained(PLACE / "model", dtype=torch.float32)
        adapted = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **settings))
        scatter(adapted, 0.3)
        adapted.eval()
        adapted.save_pretrained(PLACE / name, save_embedding_layers=False)
        (PLACE / name / "README.md").unlink(missing_ok=True)
        described = PLACE / name / "adapter_config.json"
        content = json.loads(described.read_text())
        described.write_text(json.dumps({**content, "base_model_name_or_path": "model"}, indent=1))
        with torch.no_grad():
            logits = adapted(tokens).logits
        save_file(
            {"tokens": tokens.int(), "logits": logits.contiguous()},
            PLACE / name / "logits.safetensors",
        )


def compare(model: str, adapters: str, expected: str) -> int:
    """Print how far PEFT's logits are from those expected; return 1 if that is over 1e-5."""
    wanted = load_file(expected)
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    adapted = PeftModel.from_pretrained(base, adapters).eval()
    with torch.no_grad():
        logits = adapted(wanted["tokens"].long()).logits
    apart = (logits - wanted["logits"]).abs().max().item()
    print(f"{adapters}: {apart:.1e} apart")
    return int(apart > 1e-5)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("make")
    comparing = commands.add_parser("compare")
    for word in ("model", "adapters", "logits"):
        comparing.add_argument(word)
    given = parser.parse_args()
    if given.command == "make":
        make()
    else:
        sys.exit(compare(given.model, given.adapters, given.logits))
