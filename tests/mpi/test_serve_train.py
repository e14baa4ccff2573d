"""``shardmlx launch serve --train``, asked by Tinker's SDK and by OpenAI's."""

from __future__ import annotations

import gc
import json
import signal
import sys
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest
import tinker
from tinker import types

from testbed.jobs import Running
from tests.helpers.loops import EVERYTHING, RATE, oracle
from tests.helpers.served_jobs import KEY, Served, free_port
from tests.helpers.tinker_serving import data_of, datum

MODEL = "small"
ROWS = [datum(range(10 + row, 20 + 2 * row)) for row in range(3)]
PROMPT = types.ModelInput.from_ints([10, 11, 12])


LAYOUTS: Mapping[str, tuple[int, list[str]]] = {
    "2 ranks": (2, []),
    "2 replicas of a V": (4, ["--data-parallel", "2", "--schedule", "zb-v"]),
    "2 shares": (2, ["--tensor-parallel", "2"]),
}


@pytest.fixture(scope="module", params=LAYOUTS)
def served(
    request: pytest.FixtureRequest, small: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    ranks, layout = LAYOUTS[request.param]
    launch = [sys.executable, "-m", "shardmlx", "launch", "-n", str(ranks), "serve"]
    states = tmp_path_factory.mktemp("states")
    limits = ["--max-train-length", "128", "--max-lora-rank", "8", "--state-dir", str(states)]
    options = ["--model", str(small), "--port", free_port(), "--api-key", KEY, "--timeout", "20"]
    names = ["--served-model-name", MODEL]
    with Running([*launch, "--train", *options, *layout, *limits, *names]) as running:
        yield Served(running)


def new_client(served: Served) -> tinker.ServiceClient:
    """The SDK's client, in a session of its own."""
    with warnings.catch_warnings():
        # The SDK leaves the connection open by which it asks for its settings.
        warnings.simplefilter("ignore", ResourceWarning)
        one = tinker.ServiceClient(base_url=served.url, api_key=KEY)
        assert one.holder.get_session_id()
        gc.collect()
    return one


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[tinker.ServiceClient]:
    one = new_client(served)
    yield one
    one.holder.close()


def test_a_loop_of_tinkers_sdk(client: tinker.ServiceClient, served: Served, small: Path) -> None:
    """Its losses are those of one process."""
    model = client.create_lora_training_client(MODEL, rank=4, seed=0).result()
    assert model.get_tokenizer().encode("Ahoy!")
    # Gradients of rare words are so small that rounding would decide the sign of their updates.
    adam = types.AdamParams(learning_rate=RATE, weight_decay=0.01, grad_clip_norm=2.0, eps=1e-5)
    losses = []
    for step in range(3):
        loss = model.forward_backward(data_of(step), "cross_entropy")
        update = model.optim_step(adam)
        losses.append(loss.result().metrics["loss:sum"])
        assert update.result().metrics["grad_norm:mean"] > 0
    expected = oracle(small, (*EVERYTHING, "lm_head"), steps=3, eps=1e-5)
    assert losses == pytest.approx(expected, rel=1e-5)

    sampler = model.save_weights_and_get_sampling_client().result()
    params = types.SamplingParams(max_tokens=5, seed=3)
    answers = sampler.sample(PROMPT, 4, params, include_prompt_logprobs=True).result()
    rows = [datum([*PROMPT.to_ints(), *each.tokens]) for each in answers.sequences]
    trained = model.forward(rows, "cross_entropy").result().loss_fn_outputs
    for answer, row in zip(answers.sequences, trained, strict=True):
        assert answer.logprobs is not None
        assert answers.prompt_logprobs is not None
        known = [*answers.prompt_logprobs[1:], *answer.logprobs]
        np.testing.assert_allclose(row["logprobs"].to_numpy()[: len(known)], known, atol=1e-4)

    tokens = [*PROMPT.to_ints(), *answers.sequences[0].tokens]
    dense = types.TensorData.from_numpy(np.array([[each, -1] for each in tokens[1:]]))
    sparse = types.TensorData(
        data=tokens[-1:],
        dtype="int64",
        shape=[len(tokens) - 1, 2],
        sparse_crow_indices=[0] * (len(tokens) - 1) + [1],
        sparse_col_indices=[1],
    )
    for asked, places in ((dense, slice(None)), (sparse, slice(-1, None))):
        given = sampler.sample(
            types.ModelInput.from_ints(tokens),
            1,
            types.SamplingParams(max_tokens=1),
            include_prompt_logprobs=True,
            target_prompt_logprobs=asked,
        ).result()
        assert given.target_prompt_logprobs is not None
        assert given.prompt_logprobs is not None
        found = np.array(given.target_prompt_logprobs.data).reshape(-1, 2 if asked is dense else 1)
        np.testing.assert_allclose(found[:, 0], given.prompt_logprobs[1:][places], atol=1e-5)

    path = model.save_state("warm").result().path
    again = client.create_training_client_from_state_with_optimizer(path).result()
    same = [each.forward(ROWS, "cross_entropy").result().metrics for each in (model, again)]
    assert same[0] == same[1]

    with pytest.raises(tinker.RequestFailedError) as caught:
        model.forward_backward([datum([1, 10**6, 2])], "cross_entropy").result()
    assert caught.value.category is types.RequestErrorCategory.User
    # The base answers others meanwhile: nothing that trains changes it.
    before = served.ask("Ahoy!")
    assert before == served.ask("Ahoy!") != ""
    answer = served.client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "On which day?"}],
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "day", "schema": {"enum": ["mon", "tue"]}},
        },
        max_tokens=20,
    )
    assert json.loads(answer.choices[0].message.content or "") in ("mon", "tue")


@pytest.mark.parametrize("served", ["2 ranks"], indirect=True)
@pytest.mark.parametrize("rank", [1, 0])
def test_a_lost_rank_is_the_servers_fault(rank: int, served: Served) -> None:
    client = new_client(served)
    sampler = client.create_sampling_client(base_model=MODEL).result()
    assert sampler.sample(PROMPT, 1, types.SamplingParams(max_tokens=1)).result().sequences
    long = types.SamplingParams(max_tokens=500, stop=[])
    pending = sampler.sample(PROMPT, 500, long)
    # The SDK can be told once it waits for the answer.
    served.running.until(lambda: bool(sampler._futures_poller and sampler._futures_poller._events))
    served.running.kill_rank(rank, signal.SIGKILL)
    # The new server tells it where rank 0 was ended before its answer went out.
    with pytest.raises(tinker.RequestFailedError, match=f"rank {rank}") as caught:
        pending.result()
    client.holder.close()
    assert caught.value.category is types.RequestErrorCategory.Server
