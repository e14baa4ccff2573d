"""``loop_steps.py MODEL OPTIONS``: make steps of a training loop. Rank 0 prints their losses as
JSON, and by how much an answer's log-probabilities differ as sampled and as computed."""

import json
import sys

import numpy as np

import shardmlx
from tests.helpers.loops import learn

with (
    shardmlx.connect() as transport,
    shardmlx.train_client(
        transport, model=sys.argv[1], max_train_length=48, quiet=True, **json.loads(sys.argv[2])
    ) as client,
):
    if client is not None:
        model = client.create_model(rank=4)
        losses = learn(model, range(4), eps=1e-5)
        prompt = [5, 6, 7]
        snapshot = model.snapshot()
        (answer,) = client.sample(prompt, snapshot, max_tokens=9, stop_ids=()).result().answers
        tokens = [*prompt, *answer.tokens.tolist()]
        row = {"tokens": tokens[:-1], "target_tokens": tokens[1:]}
        (logps,) = model.forward_backward([row], forward_only=True).result().logprobs
        difference = float(np.abs(logps[len(prompt) - 1 :] - answer.logprobs).max())
        print(json.dumps({"losses": losses, "difference": difference}))
