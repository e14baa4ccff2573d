"""While the rows of a request are checked and cut, which may take seconds, others are answered."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
from tinker.proto import tinker_public_pb2 as wire

from tests.helpers.tinker_serving import TinkerServing


@pytest.fixture
def busy(served: TinkerServing) -> Iterator[TinkerServing]:
    """The server, whose service takes in no rows for now."""
    served.service.takes_rows.clear()
    try:
        yield served
    finally:
        served.service.takes_rows.set()


def post_rows(served: TinkerServing, model: str, number: int) -> httpx.Response:
    request = wire.ForwardBackwardRequest(model_id=model, seq_id=number, loss_fn="cross_entropy")
    row = request.data.add()
    row.model_input.add().encoded_text.tokens = b"\1\0\0\0"
    targets = row.loss_fn_inputs["target_tokens"]
    targets.dtype = wire.DTYPE_INT64
    targets.shape.append(1)
    targets.dense = b"\2" + b"\0" * 7
    headers = {"content-type": "application/x-protobuf"}
    return served.post("forward_backward", content=request.SerializeToString(), headers=headers)


def test_heartbeats_are_answered_and_requests_of_the_model_keep_their_order(
    served: TinkerServing, busy: TinkerServing
) -> None:
    model = served.new_model()
    rows = post_rows(served, model, 1)
    step = {"model_id": model, "seq_id": 2, "adam_params": {"learning_rate": 0.01}}
    update = served.post("optim_step", step)
    other = served.new_session()
    assert served.post("session_heartbeat", {"session_id": other}).status_code == 200
    busy.service.takes_rows.set()
    # The update would fail without the gradients.
    assert served.result(update).json()["metrics"]
    output = wire.ForwardBackwardOutput()
    output.ParseFromString(served.result(rows).content)
    assert output.metrics["loss:sum"] > 0


def test_rows_that_are_cancelled_before_they_are_taken_in_are_not_computed(
    served: TinkerServing, busy: TinkerServing
) -> None:
    model = served.new_model()
    rows = post_rows(served, model, 1)
    service = busy.service
    before = len(service.submitted)
    service.holds.clear()
    try:
        cancelled = served.post("cancel_future", {"request_id": rows.json()["request_id"]})
        assert cancelled.status_code == 204
        assert "cancelled" in served.result(rows).json()["error"]
        service.takes_rows.set()
        served.until(lambda: any(each.cancelled() for each in service.submitted[before:]))
    finally:
        service.holds.set()
