"""``shardmlx launch serve --train``, asked by Tinker's SDK and by OpenAI's."""

from __future__ import annotations

import gc
import json
import signal
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tinker
from tinker import types

from testbed.jobs import Running
from tests.helpers.loops import EVERYTHING, RATE, oracle
from tests.helpers.ports import free_port
from tests.helpers.served_jobs import KEY, Served
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
    port = str(free_port())
    options = ["--model", str(small), "--port", port, "--api-key", KEY, "--timeout", "20"]
    names = ["--served-model-name", MODEL]
    with Running([*launch, "--train", *options, *layout, *limits, *names]) as running:
        yield Served(running)


def new_client(served: Served, **what: Any) -> tinker.ServiceClient:
    """The SDK's client, in a session of its own."""
    with warnings.catch_warnings():
        # The SDK leaves the connection open by which it asks for its settings.
        warnings.simplefilter("ignore", ResourceWarning)
        one = tinker.ServiceClient(base_url=served.url, api_key=KEY, **what)
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


def answers_as_rows(
    prompt: types.ModelInput, answers: types.SampleResponse, advantages: Sequence[float]
) -> list[types.Datum]:
    """Answers to a prompt as rl_loop makes rows of them."""
    rows = []
    for answer, advantage in zip(answers.sequences, advantages, strict=True):
        assert answer.logprobs is not None
        before = prompt.length - 1
        model_input = prompt.append(types.EncodedTextChunk(tokens=answer.tokens[:-1]))
        inputs = {
            "target_tokens": np.array([0] * before + answer.tokens),
            "logprobs": np.array([0.0] * before + answer.logprobs, np.float32),
            "advantages": np.array([0.0] * before + [advantage] * len(answer.tokens), np.float32),
        }
        rows.append(types.Datum(model_input=model_input, loss_fn_inputs=inputs))
    return rows


@pytest.mark.parametrize("served", ["2 ranks"], indirect=True)
def test_the_calls_of_recipes_of_the_cookbook(served: Served) -> None:
    """sl_loop and rl_loop, saves and a resume among them; then what only others call. The recipes
    themselves need torch: ``scripts/recipes.sh`` runs them."""
    client = new_client(served, user_metadata={"recipe": "sl_loop"}, display_name="sl-loop")
    adam = tinker.AdamParams(learning_rate=1e-3, beta1=0.9, beta2=0.95, eps=1e-8)
    model = client.create_lora_training_client(base_model=MODEL, rank=4).result()
    paths = []
    for step in range(2):
        paths.append(model.save_state(f"{step:06d}", ttl_seconds=604_800).result().path)
        loss = model.forward_backward(ROWS, loss_fn="cross_entropy")
        update = model.optim_step(adam)
        outputs = loss.result().loss_fn_outputs
        assert [each["logprobs"].to_numpy().shape for each in outputs] == [(9,), (10,), (11,)]
        assert update.result().metrics
    final = [
        model.save_state("final", ttl_seconds=None).result().path,
        model.save_weights_for_sampler("final", ttl_seconds=None).result().path,
    ]
    resumed = client.create_training_client_from_state_with_optimizer(paths[1]).result()
    resumed.forward_backward(ROWS, loss_fn="cross_entropy")
    resumed.optim_step(adam)
    same = [each.forward(ROWS, "cross_entropy").result().metrics for each in (model, resumed)]
    assert same[0] == same[1]

    sampler = model.save_weights_and_get_sampling_client(record_stability_info=False).result()
    params = tinker.types.SamplingParams(max_tokens=4, stop=["\n\nUser:"])
    answers = sampler.sample(prompt=PROMPT, num_samples=4, sampling_params=params).result()
    assert len({each.sequence_id for each in answers.sequences}) == 4
    differences = []
    for loss_fn, config in (("importance_sampling", None), ("ppo", {"clip_high_threshold": 1.3})):
        rows = answers_as_rows(PROMPT, answers, [1, -1, 0.5, -0.5])
        trained = model.forward_backward(rows, loss_fn=loss_fn, loss_fn_config=config)
        update = model.optim_step(adam)
        differences.append(trained.result().metrics["logprob_difference:mean"])
        assert update.result().metrics["grad_norm:mean"] > 0
    assert differences[0] < 1e-4 < differences[1]  # which comes after an update

    teacher = client.create_sampling_client(base_model=MODEL, model_path=final[1]).result()
    told = teacher.sample(
        prompt=PROMPT,
        num_samples=1,
        sampling_params=tinker.types.SamplingParams(max_tokens=1),
        include_prompt_logprobs=True,
        topk_prompt_logprobs=3,
    ).result()
    assert told.topk_prompt_logprobs is not None
    assert teacher.compute_logprobs(PROMPT).result() == told.prompt_logprobs
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # as in new_client
        rest = client._rest_client()
        gc.collect()
    assert rest.get_training_run_by_tinker_path(final[0]).result().lora_rank == 4
    rest.delete_checkpoint_from_tinker_path(paths[0]).result()
    for_others = model.save_weights_external("for-others").result().path
    url, *_ = rest.get_external_weights_urls(for_others).result().urls.values()
    assert httpx.get(url, timeout=30).status_code == 200
    rest.delete_checkpoint_from_tinker_path(for_others).result()
    assert httpx.get(url, timeout=30).status_code == 400
    client.close("success").result()

    later = new_client(served)  # whose model has the room of those
    other = later.create_training_client_from_state(final[0], user_metadata={"a": "b"}).result()
    assert other.get_info().lora_rank == 4
    later.close("success").result()


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
