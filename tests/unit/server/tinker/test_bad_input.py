"""What clients must not send: it is refused at once, by name, and concerns nobody else."""

from __future__ import annotations

import resource
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tinker
import zstandard
from tinker import types
from tinker.proto import tinker_public_pb2 as wire

from shardmlx.api.client import TrainClient
from shardmlx.api.service import TrainService
from shardmlx.server.tinker.reading import MOST_ROWS
from tests.helpers.loops import on_ranks
from tests.helpers.tinker_serving import (
    MODEL,
    MOST_BYTES,
    TinkerServing,
    datum,
    serving_service,
    serving_tinker,
)

MOST_LENGTH = 48
"""Tokens of a row, where ranks compute them."""

SECONDS = 60.0


@pytest.fixture(scope="module")
def model(served: TinkerServing) -> str:
    return served.new_model()


@pytest.fixture(scope="module")
def numbers() -> Iterator[int]:
    """The numbers of the model's requests."""
    return iter(range(1, 1000))


def message(model: str, number: int, rows: int = 1, **fields: Any) -> wire.ForwardBackwardRequest:
    request = wire.ForwardBackwardRequest(model_id=model, seq_id=number, loss_fn="cross_entropy")
    for _ in range(rows):
        row = request.data.add()
        row.model_input.add().encoded_text.tokens = np.arange(3, dtype=np.int32).tobytes()
        targets = row.loss_fn_inputs["target_tokens"]
        targets.dtype = wire.DTYPE_INT64
        targets.shape.append(3)
        targets.dense = np.arange(3, dtype=np.int64).tobytes()
    for name, value in fields.items():
        setattr(request, name, value)
    return request


def send(served: TinkerServing, body: bytes, **headers: str) -> httpx.Response:
    kind = {"content-type": "application/x-protobuf", **headers}
    return served.post("forward_backward", content=body, headers=kind)


def refused(response: httpx.Response, status: int = 400) -> str:
    assert response.status_code == status, response.text
    said = response.json()
    assert said["category"] == "user"
    return str(said["error"])


def failed(served: TinkerServing, response: httpx.Response) -> str:
    """Return why the future of a request failed."""
    result = served.result(response)
    return refused(result, 200)


@pytest.fixture(autouse=True)
def _others_go_on(served: TinkerServing, numbers: Iterator[int], model: str) -> Iterator[None]:
    """Nobody else is concerned."""
    yield
    good = send(served, message(model, next(numbers)).SerializeToString())
    output = wire.ForwardBackwardOutput()
    output.ParseFromString(served.result(good).content)
    assert output.metrics["loss:sum"] > 0


@pytest.mark.parametrize(
    ("body", "encoding", "status"),
    [
        (b"\xff\xff\xff", "", 400),
        (b"", "zstd", 400),
        (b"no zstd", "zstd", 400),
        (zstandard.compress(b"\0" * 1000)[:-2], "zstd", 400),
        (zstandard.compress(b"\0" * (MOST_BYTES + 1)), "zstd", 413),
        (b"\0" * (MOST_BYTES + 1), "", 413),
        (b"", "br", 415),
    ],
)
def test_a_body_that_is_no_message(
    served: TinkerServing, body: bytes, encoding: str, status: int
) -> None:
    refused(send(served, body, **{"content-encoding": encoding} if encoding else {}), status)


@pytest.mark.parametrize("tells_size", [True, False])
def test_a_body_that_unpacks_to_gigabytes(served: TinkerServing, tells_size: bool) -> None:
    packer = zstandard.ZstdCompressor(write_content_size=tells_size).compressobj(
        size=2 << 30 if tells_size else -1
    )
    zeros = b"\0" * (1 << 24)
    body = b"".join(packer.compress(zeros) for _ in range(128)) + packer.flush()
    assert len(body) < 1 << 20
    kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert str(MOST_BYTES) in refused(send(served, body, **{"content-encoding": "zstd"}), 413)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - kib < 200_000


def test_a_body_of_another_kind(served: TinkerServing, model: str) -> None:
    refused(served.post("forward_backward", {"model_id": model}), 415)
    form = {"content-type": "text/plain"}
    refused(served.post("optim_step", content=b"{}", headers=form), 415)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda it: it.ClearField("data"), "no rows"),
        (lambda it: it.data.extend([it.data[0]] * 10_000), "10001 rows"),
        (lambda it: setattr(it, "loss_fn", "hinge"), "'hinge'"),
        (lambda it: setattr(it, "loss_fn", "stable_reinforce"), "stable_reinforce"),
        (lambda it: setattr(it, "loss_fn", "custom"), "custom"),
        (lambda it: it.loss_fn_config.update({"low": float("nan")}), "'low' is nan"),
        (lambda it: setattr(it.loss_fn_config_v2["mode"], "text", "x"), "'mode' is 'x'"),
        (lambda it: setattr(it.data[0].model_input[0].encoded_text, "tokens", b"abc"), "row 0"),
        (lambda it: setattr(it.data[0].model_input[0].image, "format", "png"), "images"),
        (lambda it: setattr(it.data[0].model_input[0].dmel, "dmel", b"x"), "audio"),
        (lambda it: it.data[0].loss_fn_inputs["reward"].shape.append(1), "'reward'"),
        (lambda it: it.data[0].loss_fn_inputs["target_tokens"].shape.append(2), "target_tokens"),
        (lambda it: _targets(it, dtype=wire.DTYPE_FLOAT32), "target_tokens"),
        (lambda it: _targets(it, dtype=9), "its type is 9"),
        (lambda it: _targets(it, dense=b"\0" * 23), "target_tokens"),
        (lambda it: _targets(it, shape=[-1]), "target_tokens"),
        (lambda it: _sparse(it, [1 << 40, 1 << 40], [0, 1], [0]), "target_tokens"),
        (lambda it: _sparse(it, [1 << 20, 1 << 20], [0, 1], [0]), "target_tokens"),
        (lambda it: _sparse(it, [3, 2], [0, 1, 1, 1], [7]), "target_tokens"),
        (lambda it: _sparse(it, [3, 2], [0, 1, 1, 9], [0]), "target_tokens"),
        (lambda it: _sparse(it, [3], [0, 1], [0]), "target_tokens"),
        (lambda it: _sparse(it, [3, 2], [], [0]), "target_tokens"),
    ],
)
def test_rows_that_cannot_be_read(
    served: TinkerServing,
    model: str,
    numbers: Iterator[int],
    change: Callable[[wire.ForwardBackwardRequest], object],
    named: str,
) -> None:
    request = message(model, next(numbers))
    change(request)
    body = zstandard.compress(request.SerializeToString())
    assert named in failed(served, send(served, body, **{"content-encoding": "zstd"}))


def _targets(request: wire.ForwardBackwardRequest, **fields: Any) -> None:
    targets = request.data[0].loss_fn_inputs["target_tokens"]
    for name, value in fields.items():
        if name == "shape":
            targets.ClearField("shape")
            targets.shape.extend(value)
        else:
            setattr(targets, name, value)


def _sparse(
    request: wire.ForwardBackwardRequest, shape: list[int], rows: list[int], columns: list[int]
) -> None:
    _targets(request, shape=shape)
    csr = request.data[0].loss_fn_inputs["target_tokens"].sparse_csr
    csr.values = np.ones(1, np.int64).tobytes()
    csr.crow_indices = np.array(rows, np.int64).tobytes()
    csr.col_indices = np.array(columns, np.int64).tobytes()


def test_numbers_that_come_again_and_out_of_order(
    served: TinkerServing, model: str, numbers: Iterator[int]
) -> None:
    first, _, third = (next(numbers) for _ in range(3))
    one = send(served, message(model, first).SerializeToString())
    again = send(served, message(model, first).SerializeToString())
    assert one.json() == again.json()
    other = send(served, message(model, first, rows=2).SerializeToString())
    assert other.json() != one.json()
    assert "another request" in failed(served, other)
    assert served.result(one).content == served.result(again).content
    assert served.result(send(served, message(model, third).SerializeToString())).content
    late = failed(served, send(served, message(model, third - 1).SerializeToString()))
    assert f"seq_id is {third - 1}" in late
    for number in (0, -3):
        said = failed(served, send(served, message(model, number).SerializeToString()))
        assert f"seq_id is {number}" in said


def test_a_step_that_came_again_is_done_once(
    served: TinkerServing, numbers: Iterator[int], model: str
) -> None:
    said = {"model_id": model, "seq_id": next(numbers), "adam_params": {"learning_rate": 0.01}}
    before = len(served.service.submitted)
    one = served.post("optim_step", said)
    assert served.post("optim_step", said).json() == one.json()
    assert served.result(one).json()["metrics"]
    assert served.post("optim_step", said).json() == one.json()
    assert len(served.service.submitted) == before + 1


@pytest.mark.parametrize(
    ("path", "fields", "named"),
    [
        ("optim_step", {"adam_params": {"beta3": 1}}, ""),
        ("optim_step", {"adam_params": {"learning_rate": "high"}}, ""),
        ("optim_step", {}, "optim_params"),
        ("save_weights", {"path": 3}, "path"),
        ("save_weights", {"colour": "red"}, "colour"),
        ("save_weights", {"ttl_seconds": -5}, "ttl_seconds is -5"),
        ("save_weights_for_sampler", {"path": "x", "ttl_seconds": 0}, "ttl_seconds is 0"),
        ("load_weights", {"path": "tinker://x"}, "optimizer"),
        ("load_weights", {"path": "tinker://x", "optimizer": True, "model_id": None}, "model_id"),
    ],
)
def test_json_that_is_no_message(
    served: TinkerServing, model: str, path: str, fields: dict[str, Any], named: str
) -> None:
    said = served.post(path, {"model_id": model, "seq_id": 1, **fields})
    assert named in refused(said)
    refused(served.post(path, content=b"{", headers={"content-type": "application/json"}))
    refused(served.post(path, content=b"[" * 100_000, headers={"content-type": "application/json"}))


@pytest.mark.parametrize(
    ("path", "fields", "named"),
    [
        ("optim_step", {"optimizer_params": {"type": "dimuon", "learning_rate": 1}}, "dimuon"),
        ("save_weights", {"path": "a/b"}, "a/b"),
        ("save_weights", {"path": "../../etc"}, "../../etc"),
        ("save_weights", {"path": ""}, "''"),
        ("save_weights", {"path": "x" * 1000}, "xxx"),
        ("save_weights_for_sampler", {"path": "a", "kind": "inflight"}, "inflight"),
        ("save_weights_for_sampler", {}, "sampling_session_seq_id"),
        ("save_weights_external", {"path": "a", "age_encryption_recipients": ["age1"]}, "age"),
        ("load_weights", {"path": "file:///etc", "optimizer": True}, "file:///etc"),
        ("load_weights", {"path": "tinker://../x", "optimizer": True}, "../x"),
        (
            "load_weights",
            {"path": "tinker://x", "optimizer": True, "weights_access_token": "t"},
            "weights_access_token",
        ),
        (
            "load_weights",
            {"path": "tinker://x", "optimizer": True, "optimizer_config": {"type": "dimuon"}},
            "dimuon",
        ),
    ],
)
def test_what_a_model_cannot_do(
    served: TinkerServing,
    model: str,
    numbers: Iterator[int],
    path: str,
    fields: dict[str, Any],
    named: str,
) -> None:
    said = {"model_id": model, "seq_id": next(numbers), **fields}
    assert named in failed(served, served.post(path, said))


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"base_model": "llama"}, "'llama'"),
        ({"lora_config": None}, "lora_config"),
        ({"lora_config": {"rank": 0}}, "rank is 0"),
        ({"lora_config": {"rank": 2, "seed": -1}}, "seed is -1"),
        (
            {
                "lora_config": {
                    "rank": 2,
                    "train_mlp": False,
                    "train_attn": False,
                    "train_unembed": False,
                }
            },
            "train_mlp",
        ),
        ({"optimizer_config": {"type": "dimuon"}}, "dimuon"),
    ],
)
def test_models_that_cannot_be_made(
    served: TinkerServing, fields: dict[str, Any], named: str
) -> None:
    said = {
        "session_id": served.new_session(),
        "model_seq_id": 0,
        "base_model": MODEL,
        "lora_config": {"rank": 2},
        **fields,
    }
    assert named in failed(served, served.post("create_model", said))


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"num_samples": 0}, "num_samples is 0"),
        ({"num_samples": 10**9}, "num_samples"),
        ({"prompt": {"chunks": []}}, "no tokens"),
        ({"prompt": {"chunks": [{"type": "encoded_text", "tokens": [1 << 70]}]}}, "vocabulary"),
        ({"prompt": {"chunks": [{"type": "encoded_text", "tokens": [-1]}]}}, "vocabulary"),
        ({"sampling_params": {"max_tokens": 0}}, "max_tokens is 0"),
        ({"sampling_params": {"max_tokens": 10**9}}, "tokens"),
        ({"sampling_params": {"temperature": -1}}, "temperature is -1"),
        ({"sampling_params": {"top_p": 0}}, "top_p is 0"),
        ({"sampling_params": {"top_k": -2}}, "top_k is -2"),
        ({"sampling_params": {"seed": -1}}, "seed is -1"),
        ({"sampling_params": {"stop": ["a", ""]}}, "stop"),
        ({"topk_sample_logprobs": 10**6}, "topk_sample_logprobs"),
        ({"prompt_logprobs_last_n": 1}, "prompt_logprobs_last_n"),
        ({"prompt_alt_tokens_k": 2}, "prompt_alt_tokens_k"),
        ({"record_stability_info": True}, "record_stability_info"),
        (
            {"target_prompt_logprobs": {"data": [1, 1], "dtype": "int64", "shape": [2, 1]}},
            "target_prompt_logprobs has 2 rows",
        ),
        (
            {"target_prompt_logprobs": {"data": [1, 1], "dtype": "int64", "shape": [1, 1]}},
            "target_prompt_logprobs",
        ),
        (
            {"target_prompt_logprobs": {"data": [], "dtype": "int64", "shape": [1, 10**9]}},
            "target_prompt_logprobs",
        ),
    ],
)
def test_samples_that_cannot_be_drawn(
    served: TinkerServing, fields: dict[str, Any], named: str
) -> None:
    asked = {
        "sampling_session_id": served.new_sampler(),
        "seq_id": 0,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]},
        "sampling_params": {"max_tokens": 1},
        **fields,
    }
    assert named in failed(served, served.post("asample", asked))


def _beyond_the_vocabulary(request: wire.ForwardBackwardRequest) -> None:
    request.data[0].model_input[0].encoded_text.tokens = np.array([1, 10**6, 2], np.int32).tobytes()


def _without_tokens(request: wire.ForwardBackwardRequest) -> None:
    request.data[0].model_input[0].encoded_text.tokens = b""
    _targets(request, shape=[0], dense=b"")


def _too_long(request: wire.ForwardBackwardRequest) -> None:
    count = MOST_LENGTH + 1
    request.data[0].model_input[0].encoded_text.tokens = np.ones(count, np.int32).tobytes()
    _targets(request, shape=[count], dense=np.ones(count, np.int64).tobytes())


def _weights(request: wire.ForwardBackwardRequest, values: list[float]) -> None:
    weights = request.data[0].loss_fn_inputs["weights"]
    weights.dtype = wire.DTYPE_FLOAT32
    weights.shape.append(len(values))
    weights.dense = np.array(values, np.float32).tobytes()


WRONG: dict[str, Callable[[wire.ForwardBackwardRequest], object]] = {
    "1000000": _beyond_the_vocabulary,
    "2 target_tokens for 3": lambda it: _targets(it, shape=[2], dense=b"\0" * 16),
    "weights have the shape (2,)": lambda it: _weights(it, [1, 1]),
    "weights have a number that is not finite": lambda it: _weights(it, [1, float("nan"), 1]),
    "it has no tokens": _without_tokens,
    "no rows": lambda it: it.ClearField("data"),
    "'hinge'": lambda it: setattr(it, "loss_fn", "hinge"),
    "'reward'": lambda it: it.data[0].loss_fn_inputs["reward"].shape.append(1),
    f"{MOST_LENGTH + 1} tokens": _too_long,
    "10001 rows": lambda it: it.data.extend([it.data[0]] * 10_000),
}
"""What is said of a row, and the row."""


def test_refusals_come_while_the_ranks_are_busy_and_the_work_under_way_has_the_same_bits(
    small: Path,
) -> None:
    """Nothing wrong waits for its turn behind the rows of another client."""
    goes_on, is_busy = threading.Event(), threading.Event()
    goes_on.set()
    found: list[str] = []

    def look() -> None:
        if not goes_on.is_set():
            is_busy.set()
            assert goes_on.wait(SECONDS)

    def ask(service: TrainService, address: str) -> None:
        served = TinkerServing(address, service)
        try:
            with served.client() as client:
                model = client.create_lora_training_client(MODEL, rank=4, seed=0).result()
                alone = logps_of(model.forward([datum([1, 2, 3])], "cross_entropy"))
                other = served.new_model()
                goes_on.clear()
                assert is_busy.wait(SECONDS)
                pending = model.forward([datum([1, 2, 3])], "cross_entropy")
                found.extend(refusals(served, other))
                assert not pending.future().done()
                goes_on.set()
                assert logps_of(pending) == alone
                found.append("the same bits")
        finally:
            goes_on.set()
            service.close("the test is over")

    def work(loop: TrainClient) -> None:
        with serving_service(loop.service) as address:
            thread = threading.Thread(target=ask, args=(loop.service, address))
            thread.start()
            loop.service.run(look)
            thread.join()

    on_ranks(1, small, work, max_train_length=MOST_LENGTH)
    assert found == [*WRONG, "another request", "seq_id is 1", "no zstd", "the same bits"]


def logps_of(pending: Any) -> list[float]:
    (row,) = pending.result(SECONDS).loss_fn_outputs
    return [float(each) for each in row["logprobs"].data]


def refusals(served: TinkerServing, model: str) -> Iterator[str]:
    """Send what is wrong for a model, and see it refused; yield what each refusal says."""
    for number, (said, change) in enumerate(WRONG.items(), start=10):
        request = message(model, number)
        change(request)
        assert said in failed(served, send(served, request.SerializeToString()))
        yield said
    good = send(served, message(model, 100).SerializeToString())
    again = send(served, message(model, 100, rows=2).SerializeToString())
    assert again.json() != good.json()
    for said, response in (
        ("another request", again),
        ("seq_id is 1", send(served, message(model, 1).SerializeToString())),
    ):
        assert said in failed(served, response)
        yield said
    refused(send(served, b"\xff\xff\xff"))
    refused(send(served, message(model, 101).SerializeToString(), **{"x-api-key": "tml-x"}), 401)
    for body, status in ((b"no zstd", 400), (zstandard.compress(b"\0" * (MOST_BYTES + 1)), 413)):
        refused(send(served, body, **{"content-encoding": "zstd"}), status)
    yield "no zstd"


def test_names_that_are_nobodys(served: TinkerServing) -> None:
    unknown = send(served, message("nobody", 1).SerializeToString())
    assert "'nobody'" in failed(served, unknown)
    refused(served.post("get_info", {"model_id": "nobody"}), 404)
    refused(served.post("session_heartbeat", {"session_id": "nobody"}), 410)
    refused(served.post("retrieve_future", {"request_id": "nobody"}), 410)
    prompt: dict[str, Any] = {"prompt": {"chunks": []}, "sampling_params": {}}
    sample = {"sampling_session_id": "nobody", "seq_id": 1, **prompt}
    refused(served.post("asample", sample), 404)
    refused(served.get("samplers/nobody"), 404)
    refused(served.get("training_runs/nobody"), 404)
    refused(served.get("nobody"), 404)


def test_ids_of_an_earlier_start_of_the_server(served: TinkerServing) -> None:
    model = "00000000-0123456789ab:train:0"
    result = served.result(send(served, message(model, 1).SerializeToString())).json()
    assert result["category"] == "server"
    assert "create_training_client_from_state_with_optimizer" in result["error"]
    result = served.post("retrieve_future", {"request_id": f"{model}:7"}).json()
    assert result["category"] == "server"
    sampler = "00000000-0123456789ab:sample:0"
    asked = {
        "target": {"sampling_session_id": sampler, "cloned_sampler_id": 2},
        "prev_cursor": 3,
    }
    ended = served.post("retrieve_futures", asked).json()
    states = {each["request_id"]: each["state"] for each in ended["completions"]}
    assert {states[f"{sampler}:{2_000_000_000 + number}"] for number in range(100)} == {"failed"}
    again = served.post("retrieve_futures", {**asked, "prev_cursor": ended["cursor"]})
    assert again.status_code == 410


def test_who_asks_for_results_of_an_earlier_start_hears_how_that_ended(tmp_path: Path) -> None:
    with serving_tinker(tmp_path, earlier_end="rank 1 on mac-b died") as served:
        asked = {"request_id": "00000000-0123456789ab:sample:0:0"}
        result = served.post("retrieve_future", asked).json()
    assert (result["category"], "rank 1 on mac-b died" in result["error"]) == ("server", True)


def test_a_wrong_key(served: TinkerServing) -> None:
    for headers in ({}, {"x-api-key": "tml-other"}):
        response = httpx.get(f"{served.address}/api/v1/checkpoints", headers=headers, timeout=30)
        refused(response, 401)


def test_a_session_that_is_over_takes_its_models_along(served: TinkerServing) -> None:
    model = served.new_model()
    session = model.partition(":")[0]
    reason = {"reason": {"type": "success"}, "detail": None}
    assert served.post(f"sessions/{session}/finish", reason).status_code == 204
    refused(served.post("session_heartbeat", {"session_id": session}), 410)
    assert "no model" in failed(served, send(served, message(model, 1).SerializeToString()))


def test_the_sdk_divides_what_is_too_long_for_one_request(
    client: tinker.ServiceClient,
) -> None:
    model = client.create_lora_training_client(MODEL, rank=2).result()
    rows = [datum([1, 2])] * (MOST_ROWS + 1)
    result = model.forward(rows, "cross_entropy").result()
    assert len(result.loss_fn_outputs) == len(rows)
    assert isinstance(result.loss_fn_outputs[0]["logprobs"], types.TensorData)
