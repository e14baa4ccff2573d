"""Run recipes of Tinker's cookbook over ``serve --train``, and print what came of each.

The recipes are those of the package tinker-cookbook, unchanged. They take models and data sets by
names of the hub. Here both are local: a cache of the hub has the served model's tokenizer under the
name of a base model that the cookbook knows, and directories with the names of data sets have rows
made here, of sums and plain chats. Everything runs in a directory of its own.
"""

from __future__ import annotations

import _root

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from _serving import served

BASE = "Qwen/Qwen3-8B-Base"
"""The name by which the cookbook knows the served model: one whose chats are plain text."""

KEY = "tml-local"

RECIPES: Mapping[str, Sequence[str]] = {
    "sl_loop": ("recipes.sl_loop", "batch_size=4", "max_steps=4", "max_length=256"),
    "rl_loop": (
        "recipes.rl_loop",
        *("batch_size=2", "group_size=4", "max_steps=2", "max_tokens=24"),
        "loss_fn=importance_sampling",
    ),
    "math_rl": (  # the pieces of rl_basic, whose batch of 2,048 answers no flag makes smaller
        "recipes.math_rl.train",
        *("env=arithmetic", "groups_per_batch=4", "group_size=4", "max_tokens=8"),
        *("loss_fn=importance_sampling", "max_steps=2", "save_every=1", "eval_every=0"),
    ),
    "train_dpo": (
        "recipes.preference.dpo.train",
        *("dataset=hhh", "batch_size=4", "max_length=256", "max_steps=2"),
    ),
    "on_policy_distillation": (
        "recipes.distillation.on_policy_distillation",
        *(f"teacher_model={BASE}", "dataset=deepmath", "groups_per_batch=2", "group_size=2"),
        *("max_tokens=16", "lora_rank=8", "max_steps=2", "eval_every=0"),
    ),
    "off_policy_reasoning": (
        "recipes.distillation.off_policy_reasoning",
        *("batch_size=4", "lora_rank=8", "max_length=256", "max_steps=2", "eval_every=0"),
        *("renderer_name=role_colon", "buffer_size=16", "max_prompts=16"),
    ),
    "rl_numerics_check": (
        "recipes.rl_numerics_check.train",
        *("group_size=2", "groups_per_batch=1", "max_tokens=24", "max_steps=2"),
        *("max_trajectory_tokens=1500", "renderer_name=qwen3_instruct", "lora_rank=8"),
        *("task.num_pages_min=1", "task.num_pages_max=1", "task.page_chars=200"),
    ),
}
"""The module of each recipe, and its arguments."""


def write_rows(place: Path, splits: Mapping[str, Sequence[Any]], config: str = "default") -> None:
    """Write rows as a data set that ``datasets`` loads by the directory's name."""
    place.mkdir(parents=True)
    lines = ["---", "configs:", f"- config_name: {config}", "  data_files:"]
    for split, rows in splits.items():
        lines += [f"  - split: {split}", f"    path: {split}.jsonl"]
        (place / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (place / "README.md").write_text("\n".join([*lines, "---", ""]))


def make_data(root: Path) -> None:
    """Write all data sets that the recipes load, in the place of the hub's."""
    draw = random.Random(0)
    pairs = [(draw.randrange(50), draw.randrange(50)) for _ in range(64)]
    asked = [f"What is {a} + {b}?" for a, b in pairs]
    sums = [str(a + b) for a, b in pairs]
    turns = [f"\n\nHuman: {question}\n\nAssistant: " for question in asked]
    both: Mapping[str, list[Any]] = {
        "openai/gsm8k": [
            {"question": question, "answer": f"They add up.\n#### {answer}"}
            for question, answer in zip(asked, sums, strict=True)
        ],
        "HuggingFaceH4/no_robots": [
            {
                "messages": [
                    {"role": "user", "content": question},
                    {"role": "assistant", "content": answer},
                ]
            }
            for question, answer in zip(asked, sums, strict=True)
        ],
        "Anthropic/hh-rlhf": [
            {"chosen": turn + answer, "rejected": turn + "I do not know."}
            for turn, answer in zip(turns, sums, strict=True)
        ],
        "zwhe99/DeepMath-103K": [{"question": question} for question in asked],
    }
    for name, rows in both.items():
        config = "main" if name == "openai/gsm8k" else "default"
        write_rows(root / name, {"train": rows, "test": rows}, config)
    write_rows(
        root / "open-thoughts" / "OpenThoughts3-1.2M",
        {
            "train": [
                {
                    "conversations": [
                        {"from": "human", "value": question},
                        {"from": "gpt", "value": answer},
                    ]
                }
                for question, answer in zip(asked, sums, strict=True)
            ]
        },
    )
    words = ["after", "before", "being", "between", "both", "could", "during", "however", "the"]
    lines = [" ".join(draw.choices(words, k=40)) for _ in range(2000)]
    write_rows(
        root / "Salesforce" / "wikitext",
        {"train": [{"text": line} for line in lines]},
        "wikitext-103-raw-v1",
    )


def make_hub(root: Path, model: Path) -> None:
    """Make a cache of the hub, which has the model's tokenizer under the name of the base."""
    place = root / "hub" / f"models--{BASE.replace('/', '--')}"
    snapshot = place / "snapshots" / "0"
    snapshot.mkdir(parents=True)
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text("0")
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (snapshot / name).symlink_to((model / name).resolve())


def serving(model: Path, ranks: int, states: Path) -> AbstractContextManager[str]:
    """Serve the model; give the address."""
    command = [sys.executable, "-m", "shardmlx", "launch", "-n", str(ranks), "serve", "--train"]
    named = ["--model", str(model.resolve()), "--served-model-name", BASE, "--port", "0"]
    room = ["--max-train-length", "1024", "--state-dir", str(states), "--batch-size", "16"]
    return served([*command, *named, *room])


def run(python: str, name: str, address: str, root: Path, seconds: float) -> str | None:
    """Run a recipe; return why it failed, or None. Its output is in the file NAME.log."""
    module, *arguments = RECIPES[name]
    log = root / f"{name}.log"
    where = [f"log_path={root / 'logs' / name}", f"model_name={BASE}"]
    environment = {
        **os.environ,
        "TINKER_BASE_URL": address,
        "TINKER_API_KEY": KEY,
        "HF_HOME": str(root),
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_CACHE": str(root / "datasets"),
        "WANDB_MODE": "disabled",
    }
    with log.open("w") as output:
        done = subprocess.run(
            [python, "-m", f"tinker_cookbook.{module}", *where, *arguments],
            cwd=root,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            timeout=seconds,
            check=False,
        )
    lines = log.read_text().strip().splitlines() or ["it said nothing"]
    return None if done.returncode == 0 else lines[-1][:300]


def last_metrics(root: Path, name: str) -> str:
    """Return what a recipe's last step told of itself."""
    file = root / "logs" / name / "metrics.jsonl"
    if not file.exists():
        return ""
    told = json.loads(file.read_text().splitlines()[-1])
    words = ("nll", "reward", "kl_sample_train", "loss")
    numbers = {key: value for key, value in told.items() if isinstance(value, (int, float))}
    return ", ".join(
        f"{key} {value:.4g}" for key, value in numbers.items() if any(word in key for word in words)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--recipes", default=sys.executable, help="a Python with the cookbook")
    parser.add_argument("--model", type=Path, default=Path(".cache/smollm2-135m-instruct"))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=1800, help="for each recipe")
    parser.add_argument("--only", nargs="+", choices=RECIPES, default=list(RECIPES))
    parser.add_argument("--keep", type=Path, help="a directory for logs, which stays")
    args = parser.parse_args()
    failed = 0
    with tempfile.TemporaryDirectory() as made:
        root = Path(args.keep or made).resolve()
        root.mkdir(parents=True, exist_ok=True)
        make_data(root)
        make_hub(root, args.model)
        with serving(args.model, args.ranks, root / "states") as address:
            for name in args.only:
                began = time.monotonic()
                try:
                    why = run(os.path.abspath(args.recipes), name, address, root, args.seconds)
                except subprocess.TimeoutExpired:
                    why = f"it took more than {args.seconds:g} s"
                failed += why is not None
                said = f"FAULT {why}" if why else f"ok  {last_metrics(root, name)}"
                print(f"{name:24} {time.monotonic() - began:6.1f} s  {said}", flush=True)
    print(f"{failed} failed" if failed else "all well")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
