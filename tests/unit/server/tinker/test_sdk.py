"""What Tinker's own SDK does with the server."""

from __future__ import annotations

import io
import urllib.request

import numpy as np
import pytest
import tinker
from tinker import types

from tests.helpers.one_process_service import MOST_SNAPSHOTS, VOCABULARY
from tests.helpers.tinker_serving import MODEL, MOST_TOKENS, TinkerServing, datum

ROWS = [datum(range(10 + row, 20 + 2 * row)) for row in range(3)]
PROMPT = types.ModelInput.from_ints([10, 11, 12])


def test_a_loop_trains_and_the_loss_of_its_rows_falls(client: tinker.ServiceClient) -> None:
    model = client.create_lora_training_client(MODEL, rank=4, seed=1).result()
    losses = []
    for _ in range(4):
        losses_of_rows = model.forward_backward(ROWS, "cross_entropy")
        step = model.optim_step(types.AdamParams(learning_rate=1e-2))
        losses.append(losses_of_rows.result().metrics["loss:sum"])
        assert step.result().metrics["grad_norm"] > 0
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.7 * losses[0]


def test_each_row_has_the_log_probabilities_of_its_targets(trained: tinker.TrainingClient) -> None:
    result = trained.forward(ROWS, "cross_entropy").result()
    logprobs = [each["logprobs"].to_numpy() for each in result.loss_fn_outputs]
    assert [each.shape for each in logprobs] == [(9,), (10,), (11,)]
    assert {each.dtype for each in logprobs} == {np.dtype(np.float32)}
    assert -sum(each.sum() for each in logprobs) == pytest.approx(result.metrics["loss:sum"])


def test_soft_targets_come_as_tables_dense_or_sparse(trained: tinker.TrainingClient) -> None:
    hard = datum([1, 2, 3])
    ids = np.array([[2, 5, 7], [3, 0, 0]])
    weights = np.array([[0.5, 0.25, 0.25], [1, 0, 0]], np.float32)
    soft = datum([1, 2, 3], target_tokens=ids, weights=weights)
    sparse = datum(
        [1, 2, 3],
        target_tokens=types.TensorData([2, 5, 7, 3], "int64", [2, 3], [0, 3, 4], [0, 1, 2, 0]),
        weights=types.TensorData(
            [0.5, 0.25, 0.25, 1.0], "float32", [2, 3], [0, 3, 4], [0, 1, 2, 0]
        ),
    )
    result = trained.forward([hard, soft, sparse, hard], "cross_entropy").result()
    found = [each["logprobs"].to_numpy() for each in result.loss_fn_outputs]
    assert [each.shape for each in found] == [(2,), (2, 3), (2, 3), (2,)]
    np.testing.assert_array_equal(found[1], found[2])
    np.testing.assert_array_equal(found[0], found[1][:, 0])
    np.testing.assert_array_equal(found[0], found[3])


def test_what_ended_an_answer_is_part_of_it(trained: tinker.TrainingClient) -> None:
    sampler = trained.save_weights_and_get_sampling_client().result()
    greedy = types.SamplingParams(max_tokens=4, temperature=0)
    free = sampler.sample(PROMPT, 1, greedy).result().sequences[0]
    assert (free.stop_reason, len(free.tokens)) == ("length", 4)
    for stop in ([free.tokens[0]], [chr(free.tokens[0])], chr(free.tokens[0])):
        params = types.SamplingParams(max_tokens=4, temperature=0, stop=stop)
        (ended,) = sampler.sample(PROMPT, 1, params).result().sequences
        assert (ended.stop_reason, ended.tokens) == ("stop", free.tokens[:1])


def test_samples_and_prompts_have_log_probabilities(trained: tinker.TrainingClient) -> None:
    sampler = trained.save_weights_and_get_sampling_client().result()
    params = types.SamplingParams(max_tokens=3, seed=2)
    result = sampler.sample(
        PROMPT,
        2,
        params,
        include_prompt_logprobs=True,
        topk_prompt_logprobs=2,
        topk_sample_logprobs=5,
    ).result()
    assert result.prompt_logprobs is not None
    assert result.prompt_logprobs[0] is None
    assert result.topk_prompt_logprobs is not None
    assert len({each.sequence_id for each in result.sequences}) == 2
    for answer in result.sequences:
        assert answer.logprobs is not None
        assert answer.topk_logprobs_np is not None
        assert answer.topk_logprobs_np.token_ids.shape == (3, 5)
        row = datum([*PROMPT.to_ints(), *answer.tokens])
        (told,) = trained.forward([row], "cross_entropy").result().loss_fn_outputs
        logprobs = told["logprobs"].to_numpy()
        np.testing.assert_allclose(logprobs[-3:], answer.logprobs, atol=1e-5)
        np.testing.assert_allclose(logprobs[:2], result.prompt_logprobs[1:], atol=1e-5)
    last = sampler.compute_logprobs(PROMPT, prompt_logprobs_last_n=1).result()
    assert last[:2] == [None, None]
    assert last[2] == pytest.approx(result.prompt_logprobs[2])


def test_a_saved_state_trains_on_as_the_model_does(client: tinker.ServiceClient) -> None:
    first = client.create_lora_training_client(MODEL, rank=4, seed=1).result()
    adam = types.AdamParams(learning_rate=1e-2)
    first.forward_backward(ROWS, "cross_entropy")
    first.optim_step(adam)
    path = first.save_state("warm", user_metadata={"why": "test"}).result().path
    second = client.create_training_client_from_state_with_optimizer(path).result()
    assert second.get_info().lora_rank == 4
    after = []
    for model in (first, second):
        model.forward_backward(ROWS, "cross_entropy")
        model.optim_step(adam)
        after.append(model.forward(ROWS, "cross_entropy").result().metrics["loss:sum"])
    assert after[0] == after[1]
    fresh = client.create_training_client_from_state(path).result()
    fresh.forward_backward(ROWS, "cross_entropy")
    fresh.optim_step(adam)
    assert fresh.forward(ROWS, "cross_entropy").result().metrics["loss:sum"] != after[0]


def test_a_loss_of_ones_own_trains(client: tinker.ServiceClient) -> None:
    torch = pytest.importorskip("torch")
    model = client.create_lora_training_client(MODEL, rank=4, seed=1).result()

    def squares(data: object, logprobs: list[object]) -> tuple[object, dict[str, float]]:
        return sum(torch.square(each).sum() for each in logprobs), {"rows:sum": len(logprobs)}

    before = model.forward_backward_custom(ROWS, squares)
    model.optim_step(types.AdamParams(learning_rate=1e-3))
    after = model.forward_backward_custom(ROWS, squares)
    assert after.result().metrics["loss:sum"] < before.result().metrics["loss:sum"]


def test_a_snapshot_that_was_used_least_lately_makes_room(client: tinker.ServiceClient) -> None:
    model = client.create_lora_training_client(MODEL, rank=4).result()
    one = types.SamplingParams(max_tokens=1)
    kept = client.create_sampling_client(
        model_path=model.save_weights_for_sampler("kept").result().path
    ).result()
    samplers = [
        model.save_weights_and_get_sampling_client().result() for _ in range(MOST_SNAPSHOTS + 1)
    ]
    for sampler in samplers[-MOST_SNAPSHOTS:]:
        assert len(sampler.sample(PROMPT, 1, one).result().sequences) == 1
    # What was saved under a name is read from the disk again.
    assert len(kept.sample(PROMPT, 1, one).result().sequences) == 1
    with pytest.raises(tinker.RequestFailedError, match="save_weights_for_sampler") as caught:
        samplers[0].sample(PROMPT, 1, one).result()
    assert caught.value.category is types.RequestErrorCategory.User


def logprobs_of(sampler: tinker.SamplingClient) -> list[float | None]:
    return list(sampler.compute_logprobs(PROMPT).result())


def test_a_sampler_has_the_weights_that_its_path_had_when_it_was_made(
    client: tinker.ServiceClient, rest: tinker.RestClient
) -> None:
    """What is saved again under the same name is another one; old samplers keep what they have."""
    model = client.create_lora_training_client(MODEL, rank=4, seed=1).result()
    path = model.save_state("same").result().path
    old = client.create_sampling_client(model_path=path).result()
    before = logprobs_of(old)
    model.forward_backward(ROWS, "cross_entropy")
    model.optim_step(types.AdamParams(learning_rate=1e-2)).result()
    model.save_state("same", overwrite=True).result()
    after = logprobs_of(client.create_sampling_client(model_path=path).result())
    assert after == logprobs_of(model.save_weights_and_get_sampling_client().result()) != before
    assert logprobs_of(old) == before
    for _ in range(MOST_SNAPSHOTS):  # which make the old one leave: it is nowhere any more
        logprobs_of(model.save_weights_and_get_sampling_client().result())
    with pytest.raises(tinker.RequestFailedError, match="saved anew") as caught:
        logprobs_of(old)
    assert caught.value.category is types.RequestErrorCategory.User
    rest.delete_checkpoint_from_tinker_path(path).result()
    with pytest.raises(tinker.NotFoundError):
        client.create_sampling_client(model_path=path).result()


def test_runs_and_checkpoints_are_listed_and_deleted(
    client: tinker.ServiceClient, rest: tinker.RestClient
) -> None:
    metadata = {"run": "seven"}
    model = client.create_lora_training_client(MODEL, rank=8, user_metadata=metadata).result()
    path = model.save_state("a", user_metadata={"step": "1"}).result().path
    sampler = model.save_weights_for_sampler("b").result().path
    assert path == f"tinker://{model.model_id}/weights/a"
    assert sampler == f"tinker://{model.model_id}/sampler_weights/b"
    run = rest.get_training_run(model.model_id).result()
    assert (run.lora_rank, run.base_model, run.user_metadata) == (8, MODEL, metadata)
    assert run.last_checkpoint is not None
    assert run.last_checkpoint.user_metadata == {"step": "1"}
    assert model.model_id in [
        each.training_run_id for each in rest.list_training_runs().result().training_runs
    ]
    found = rest.list_checkpoints(model.model_id).result().checkpoints
    assert [each.checkpoint_type for each in found] == ["training", "sampler"]
    info = rest.get_weights_info_by_tinker_path(path).result()
    assert (info.base_model, info.lora_rank, info.train_mlp) == (MODEL, 8, True)
    rest.delete_checkpoint_from_tinker_path(sampler).result()
    left = rest.list_user_checkpoints().result().checkpoints
    assert path in [each.tinker_path for each in left]
    assert sampler not in [each.tinker_path for each in left]


def test_the_files_of_an_adapter_come_by_urls_without_a_key(
    trained: tinker.TrainingClient, rest: tinker.RestClient
) -> None:
    path = trained.save_weights_external("for-others").result().path
    urls = rest.get_external_weights_urls(path).result().urls
    (name,) = urls
    with urllib.request.urlopen(urls[name]) as response:
        assert "model.layers.0.mlp.up_proj.lora_a" in np.load(io.BytesIO(response.read()))
    with pytest.raises(urllib.error.HTTPError, match="404"):
        urllib.request.urlopen(urls[name].replace(name, "other"))
    rest.delete_checkpoint_from_tinker_path(path).result()
    with pytest.raises(urllib.error.HTTPError, match="40"):
        urllib.request.urlopen(urls[name])


def test_the_server_says_what_it_serves(rest: tinker.RestClient) -> None:
    (model,) = rest.get_server_capabilities().result().supported_models
    assert (model.model_name, model.max_context_length) == (MODEL, MOST_TOKENS)
    assert (model.trainable, model.sampleable) == (True, True)


def test_a_sample_that_its_client_cancels_ends(
    client: tinker.ServiceClient, served: TinkerServing
) -> None:
    sampler = client.create_sampling_client(base_model=MODEL).result()
    submitted = served.service.submitted
    before = len(submitted)
    served.service.holds.clear()
    try:
        future = sampler.sample(PROMPT, 1, types.SamplingParams(max_tokens=100))
        other = sampler.sample(PROMPT, 1, types.SamplingParams(max_tokens=1))
        # The SDK cannot cancel before it was told the futures' ids.
        served.until(lambda: len(getattr(sampler._futures_poller, "_events", ())) == 2)
        future.future().cancel()
        served.until(lambda: any(each.cancelled() for each in submitted[before:]))
    finally:
        served.service.holds.set()
    assert len(other.result().sequences) == 1


def test_tokens_beyond_the_vocabulary_fail_alone(trained: tinker.TrainingClient) -> None:
    bad = trained.forward_backward([datum([1, VOCABULARY, 3])], "cross_entropy")
    good = trained.forward(ROWS, "cross_entropy")
    with pytest.raises(tinker.RequestFailedError) as caught:
        bad.result()
    assert caught.value.category is types.RequestErrorCategory.User
    assert len(good.result().loss_fn_outputs) == len(ROWS)


def test_what_waits_when_a_rank_is_lost_is_told_so(
    trained: tinker.TrainingClient, served: TinkerServing
) -> None:
    submitted = served.service.submitted
    before = len(submitted)
    served.service.holds.clear()
    try:
        pending = trained.forward(ROWS, "cross_entropy")
        served.until(lambda: len(submitted) == before + 1)
        served.service.fail("rank 1 died")
        with pytest.raises(tinker.RequestFailedError, match="rank 1 died: go on from") as caught:
            pending.result()
    finally:
        served.service.holds.set()
    assert caught.value.category is types.RequestErrorCategory.Server
