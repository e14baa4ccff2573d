"""``_shares.py TOKENS ROUNDS``: a rank of MLX's ring that decodes alone, and with its share.

Each process has one core. Rank 0 prints, as JSON, the bytes of the whole model and of a share, and
for each round the seconds of a token on one process, of a sum, and of a token with shares; also
whether both texts are the same.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

from _models import WIDE, of_width
from generation import own_core, prompts

from shardmlx.common.environment import prepare

WIDTH, PROMPT, SUMS = 1024, 32, 200


def main() -> None:
    tokens, rounds = map(int, sys.argv[1:])
    own_core(int(os.environ["MLX_RANK"]))
    prepare()
    import mlx.core as mx
    from mlx.utils import tree_flatten
    from mlx_lm.generate import generate_step
    from mlx_lm.models.llama import Model, ModelArgs

    group = mx.distributed.init(strict=True, backend="ring")

    def model() -> Model:
        mx.random.seed(0)
        return Model(ModelArgs.from_dict({**WIDE, **of_width(WIDTH)}))

    def nbytes(model: Model) -> int:
        mx.eval(model.parameters())
        return sum(array.nbytes for _, array in tree_flatten(model.parameters()))

    def decode(model: Model) -> tuple[float, list[int]]:
        """Return the seconds of a token after the first, and the text."""
        prompt = mx.array(prompts(1, PROMPT)[0]) % WIDE["vocab_size"]
        text, start = [], 0.0
        for token, _ in generate_step(prompt, model, max_tokens=tokens):
            start = start or time.perf_counter()
            text.append(int(token))
        return (time.perf_counter() - start) / (tokens - 1), text

    def sum_seconds() -> float:
        """Return the seconds of a sum in a graph of nothing else."""
        hidden = mx.ones((1, WIDTH))
        mx.eval(mx.distributed.all_sum(hidden, group=group))  # both are here
        start = time.perf_counter()
        for _ in range(SUMS):
            hidden = mx.distributed.all_sum(hidden, group=group) / group.size()
        mx.eval(hidden)
        return (time.perf_counter() - start) / SUMS

    whole, shares = model(), model()
    shares.shard(group)
    found: dict[str, Any] = {"bytes": [nbytes(whole), nbytes(shares)], "rounds": []}
    for turn in range(rounds + 1):
        alone, text = decode(whole) if group.rank() == 0 else (0.0, [])
        of_sum = sum_seconds()
        together, its_text = decode(shares)
        if turn > 0:  # the first warms up
            found["rounds"].append([alone, of_sum, together])
            found["same_text"] = found.get("same_text", True) and text == its_text
    if group.rank() == 0:
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
