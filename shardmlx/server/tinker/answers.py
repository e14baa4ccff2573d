"""Write what Tinker's SDK reads: JSON, and its protobuf messages. No MLX, no MPI."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from pydantic import BaseModel
from tinker import types
from tinker.proto import tinker_public_pb2 as wire

from shardmlx.api.requests import LossResult, SampledAnswer, SampleResult, TopTokens
from shardmlx.server.body_reader import JSON
from shardmlx.server.tinker.reading import PROTOBUF

NOTHING = -99999.0
"""The log-probability of a place without one, in Tinker's tables."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The end of a request's future: bytes of this media type."""

    media_type: str
    content: bytes
    is_failure: bool = False


def as_json(message: BaseModel) -> Answer:
    """Return a message as JSON."""
    return Answer(JSON, message.model_dump_json(exclude_none=True).encode())


def failure(error: str, category: types.RequestErrorCategory) -> Answer:
    """Return the answer to a request that failed by the ``category``'s fault."""
    message = types.RequestFailedResponse(error=error, category=category)
    return Answer(JSON, message.model_dump_json().encode(), is_failure=True)


def loss_answer(result: LossResult) -> Answer:
    """Return the log-probabilities of rows, and their metrics."""
    output = wire.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord")
    for name, value in result.metrics.items():
        # The SDK adds up metrics of several requests as their names say.
        output.metrics[name if ":" in name else f"{name}:mean"] = value
    for rows in _alike(result.logprobs):
        record = output.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=len(rows))
        tensor = record.fields["logprobs"]
        tensor.dtype = wire.DTYPE_FLOAT32
        tensor.trailing_shape.extend(rows[0].shape[1:])
        tensor.data = b"".join(row.astype(np.float32).tobytes() for row in rows)
        ends = np.cumsum([row.size * 4 for row in rows])
        tensor.offsets = np.concatenate([[0], ends]).astype(np.int64).tobytes()
    return Answer(PROTOBUF, output.SerializeToString())


def _alike(rows: Sequence[np.ndarray]) -> list[list[np.ndarray]]:
    """Return the rows in runs of those with the same shape but for their lengths."""
    runs: list[list[np.ndarray]] = []
    for row in rows:
        if runs and runs[-1][0].shape[1:] == row.shape[1:]:
            runs[-1].append(row)
        else:
            runs.append([row])
    return runs


def step_answer(metrics: Mapping[str, float]) -> Answer:
    """Return the metrics of a step of the optimizer."""
    return as_json(types.OptimStepResponse(metrics=dict(metrics)))


def sample_answer(asked: types.SampleRequest, result: SampleResult) -> Answer:
    """Return the answers to a prompt, in the layout in which log-probabilities were ``asked``."""
    response = wire.SampleResponse(prompt_cache_hit_tokens=result.cached)
    for each in result.answers:
        _add_sequence(response, each)
    if result.prompt_logprobs is not None:
        response.prompt_logprobs = result.prompt_logprobs.astype(np.float32).tobytes()
    if result.top_prompt is not None:
        _fill_table(response.topk_prompt_logprobs, result.top_prompt)
    given = asked.target_prompt_logprobs
    if given is not None and result.other_logprobs is not None:
        tensor = response.target_prompt_logprobs
        tensor.dtype = wire.DTYPE_FLOAT32
        tensor.shape.extend(result.other_logprobs.shape)
        if given.sparse_crow_indices is None:
            tensor.dense = result.other_logprobs.tobytes()
        else:
            begins = np.array(given.sparse_crow_indices, np.int64)
            places = np.array(given.sparse_col_indices, np.int64)
            rows = np.repeat(np.arange(len(begins) - 1), np.diff(begins))
            tensor.sparse_csr.crow_indices = begins.tobytes()
            tensor.sparse_csr.col_indices = places.tobytes()
            tensor.sparse_csr.values = result.other_logprobs[rows, places].tobytes()
    return Answer(PROTOBUF, response.SerializeToString())


def _add_sequence(response: wire.SampleResponse, answer: SampledAnswer) -> None:
    ends = {"stop": wire.STOP_REASON_STOP, "length": wire.STOP_REASON_LENGTH}
    sequence = response.sequences.add(
        stop_reason=ends[answer.reason],
        tokens=answer.tokens.astype(np.int32).tobytes(),
        logprobs=answer.logprobs.astype(np.float32).tobytes(),
    )
    if answer.top is not None:
        _fill_table(sequence.topk_sampled_logprobs, answer.top)


def _fill_table(table: wire.TopkLogprobs, top: TopTokens) -> None:
    is_there = np.isfinite(top.logprobs)
    table.length, table.k = top.ids.shape
    table.token_ids = np.where(is_there, top.ids, 0).astype(np.int32).tobytes()
    table.logprobs = np.where(is_there, top.logprobs, NOTHING).astype(np.float32).tobytes()
