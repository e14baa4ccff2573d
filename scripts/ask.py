#!/usr/bin/env python3
"""Ask a model one question, in one process, and print its answer: mlx_lm.generate, but quiet."""

import argparse
from collections.abc import Sequence

from shardmlx.environment import prepare

prepare()

from mlx_lm import generate, load  # noqa: E402 - after prepare()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="model directory or repository")
    parser.add_argument("--adapter-path", help="directory of trained adapters")
    parser.add_argument("--prompt", required=True, help="the question")
    parser.add_argument("--max-tokens", type=int, default=40, help="longest answer (default: 40)")
    options = parser.parse_args(argv)
    model, tokenizer = load(options.model, adapter_path=options.adapter_path)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": options.prompt}], add_generation_prompt=True
    )
    print(" ".join(generate(model, tokenizer, prompt, max_tokens=options.max_tokens).split()))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
