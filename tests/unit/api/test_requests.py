"""Requests of a training loop are plain data."""

import pickle

from shardmlx.api.requests import LOSSES, CreateModel, ForwardBackward, LoraOptions, OptimStep


def test_requests_travel_and_have_tinker_s_defaults() -> None:
    """Tinker's Adam has beta2 0.95 and eps 1e-12, and clips nothing."""
    step = OptimStep("m")
    assert (step.beta1, step.beta2, step.eps, step.grad_clip_norm) == (0.9, 0.95, 1e-12, 0.0)
    assert ForwardBackward("m", []).loss == LOSSES[0]
    made = CreateModel("m", LoraOptions(rank=4))
    assert pickle.loads(pickle.dumps(made)) == made
