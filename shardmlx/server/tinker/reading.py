"""Read what Tinker's SDK sends: JSON, and its protobuf messages. No MLX, no MPI.

A body that cannot be read raises ``ApiError``. A request that cannot be met raises ``UserError``:
by then it has its number, and its future fails.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import zstandard
from google.protobuf.message import DecodeError
from pydantic import BaseModel, ValidationError
from tinker import types
from tinker.proto import tinker_public_pb2 as wire

from shardmlx.api.requests import LOSSES, LoraOptions, LossRow, OptimStep, SamplePrompt
from shardmlx.errors import UserError
from shardmlx.server.openai_errors import ApiError, refused, shown

PROTOBUF = "application/x-protobuf"

MOST_ROWS = 1024
"""Rows of one request; the SDK divides longer ones."""

MOST_SAMPLES = 1024
"""Answers to one prompt."""

MOST_OTHERS = 256
"""Tokens at each place of a prompt whose log-probabilities are asked for by their ids."""

MOST_TOP = 20
"""Likeliest tokens at a place."""

EXPANSION = 4
"""Bytes of sparse tensors once they are dense, for each byte that a body may have."""

_NO_LOSSES = {
    "stable_reinforce": "its formula is not public: use importance_sampling, ppo, cispo or gspo",
    "custom": "losses are not uploaded to this server: the SDK computes them on the client",
}
"""Losses that Tinker has and we have not, and why."""

_DTYPES: Mapping[int, np.dtype[Any]] = {
    wire.DTYPE_FLOAT32: np.dtype(np.float32),
    wire.DTYPE_INT64: np.dtype(np.int64),
    wire.DTYPE_INT32: np.dtype(np.int32),
}

_INPUTS: Mapping[str, np.dtype[Any]] = {
    "target_tokens": np.dtype(np.int64),
    "weights": np.dtype(np.float32),
    "advantages": np.dtype(np.float32),
    "logprobs": np.dtype(np.float32),
    "clip_low_threshold": np.dtype(np.float32),
    "clip_high_threshold": np.dtype(np.float32),
    "sequence_ratio_mask": np.dtype(np.float32),
}
"""The inputs that a loss may have, and the type of each."""

_Model = TypeVar("_Model", bound=BaseModel)


def read_json(kind: type[_Model], body: bytes) -> _Model:
    """Return the message of a JSON body. Raises ``ApiError``."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        where = ".".join(map(str, first["loc"])) or "the body"
        raise refused(f"{where}: {first['msg']}") from None


def unpack(body: bytes, encoding: str, most: int) -> bytes:
    """Return a body as it was before its ``Content-Encoding``, of at most ``most`` bytes. Raises
    ``ApiError``."""
    if encoding in ("", "identity"):
        return body
    if encoding != "zstd":
        raise ApiError(415, f"the body's encoding is {shown(encoding)}: send zstd, or none")
    too_large = ApiError(413, f"the body unpacks to more than {most} bytes, the most that is read")
    unpacker = zstandard.ZstdDecompressor(max_window_size=1 << 27)
    try:
        if zstandard.frame_content_size(body) > most:
            raise too_large
        # Where its head tells no size, this bounds it.
        if len(unpacker.stream_reader(body).read(most + 1)) > most:
            raise too_large
        return unpacker.decompress(body, max_output_size=most, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise refused(f"the body is not zstd, or a part of one: {error}") from None


def read_forward_backward(body: bytes) -> wire.ForwardBackwardRequest:
    """Return the message of a body. Raises ``ApiError``."""
    message = wire.ForwardBackwardRequest()
    try:
        message.ParseFromString(body)
    except DecodeError as error:
        raise refused(
            f"the body is not a ForwardBackwardRequest of tinker.proto: {error}"
        ) from None
    return message


def loss_of(message: wire.ForwardBackwardRequest) -> str:
    """Return the name of a request's loss. Raises ``UserError``."""
    name = str(message.loss_fn)
    if name in _NO_LOSSES:
        raise UserError(f"the loss {name} is not computed here", _NO_LOSSES[name])
    if name not in LOSSES:
        raise UserError(f"the loss is {shown(name)}", f"it is one of {', '.join(LOSSES)}")
    return name


def settings_of(message: wire.ForwardBackwardRequest) -> dict[str, float]:
    """Return the settings of a request's loss. Raises ``UserError``."""
    settings = dict(message.loss_fn_config)
    for name, value in message.loss_fn_config_v2.items():
        if value.WhichOneof("value") != "number":
            problem = f"loss_fn_config: {shown(name)} is {shown(value.text)}"
            raise UserError(problem, "give a number")
        settings[name] = value.number
    for name, number in settings.items():
        if not math.isfinite(number):
            raise UserError(f"loss_fn_config: {shown(name)} is {number}", "give a finite number")
    return settings


def rows_of(message: wire.ForwardBackwardRequest, most_bytes: int) -> list[LossRow]:
    """Return a request's rows, whose arrays have at most ``most_bytes``. Raises ``UserError``."""
    if not message.data:
        raise UserError("the request has no rows", "send at least one")
    if len(message.data) > MOST_ROWS:
        problem = f"the request has {len(message.data)} rows"
        raise UserError(problem, f"send at most {MOST_ROWS} at once, as the SDK does")
    rows = []
    left = most_bytes
    for number, datum in enumerate(message.data):
        row = _row(datum, f"row {number}", left)
        left -= row.tokens.nbytes + sum(each.nbytes for each in row.inputs.values())
        rows.append(row)
    return rows


def _row(datum: wire.Datum, where: str, most_bytes: int) -> LossRow:
    pieces = [_token_bytes(chunk, where) for chunk in datum.model_input]
    tokens = np.frombuffer(b"".join(pieces), np.int32)
    inputs = {}
    for name, tensor in datum.loss_fn_inputs.items():
        if name not in _INPUTS:
            problem = f"{where}: a loss has no input {shown(name)}"
            raise UserError(problem, f"there are {', '.join(_INPUTS)}")
        values = _array(tensor, f"{where}: {name}", most_bytes)
        if name == "target_tokens" and values.dtype.kind != "i":
            raise UserError(f"{where}: target_tokens are no integers", "send int64")
        inputs[name] = values.astype(_INPUTS[name])
    return LossRow(tokens, inputs)


def _token_bytes(chunk: wire.Chunk, where: str) -> bytes:
    kind = chunk.WhichOneof("chunk")
    if kind != "encoded_text":
        said = {"image": "images", "dmel": "audio"}.get(kind or "", "what it has")
        raise UserError(f"{where}: this server reads no {said}", "send tokens")
    if len(chunk.encoded_text.tokens) % 4:
        raise UserError(f"{where}: its tokens are cut", "send whole int32")
    return bytes(chunk.encoded_text.tokens)


def _array(tensor: wire.Tensor, where: str, most_bytes: int) -> np.ndarray:
    """Return a tensor as a dense array of at most ``most_bytes``. Raises ``UserError``."""
    dtype = _DTYPES.get(tensor.dtype)
    if dtype is None:
        raise UserError(f"{where}: its type is {tensor.dtype}", "send float32 or int64")
    shape = tuple(tensor.shape)
    if any(size < 0 for size in shape) or math.prod(shape) * dtype.itemsize > most_bytes:
        problem = f"{where}: its shape is {shown(list(shape))}"
        raise UserError(problem, f"a request has at most {most_bytes} bytes once it is dense")
    try:
        if tensor.WhichOneof("encoding") == "sparse_csr":
            return _dense(tensor.sparse_csr, dtype, shape)
        values = np.frombuffer(tensor.dense, dtype)
        return values.reshape(shape) if shape else values
    except (ValueError, IndexError):
        problem = f"{where}: its values do not fill the shape {shown(list(shape))}"
        raise UserError(problem, "send as many as it has places") from None


def _dense(csr: wire.SparseCsr, dtype: np.dtype[Any], shape: tuple[int, ...]) -> np.ndarray:
    """Return a sparse matrix with 0 where it has nothing. Raises ``ValueError``, ``IndexError``."""
    values = np.frombuffer(csr.values, dtype)
    begins = np.frombuffer(csr.crow_indices, np.int64)
    places = np.frombuffer(csr.col_indices, np.int64)
    return _dense_of(values, begins, places, shape, 0)


def _dense_of(
    values: np.ndarray,
    begins: np.ndarray,
    places: np.ndarray,
    shape: tuple[int, ...],
    nothing: int,
) -> np.ndarray:
    """Return a matrix of compressed rows, with ``nothing`` where it has none. Raises as
    ``_dense``."""
    rows, columns = shape
    counts = np.diff(begins)
    fits = len(counts) == rows and begins[0] == 0 and begins[-1] == len(values) == len(places)
    if not fits or (counts < 0).any() or (places < 0).any() or (places >= columns).any():
        raise ValueError("its indices are wrong")
    dense = np.full(shape, nothing, values.dtype)
    dense[np.repeat(np.arange(rows), counts), places] = values
    return dense


def lora_of(config: types.LoraConfig, seed: int) -> LoraOptions:
    """Return the options of a new LoRA, with this ``seed`` where the client gave none. Raises
    ``UserError``."""
    if config.rank < 1:
        raise UserError(f"lora_config: rank is {config.rank}", "give 1 or more")
    if config.seed is not None and not 0 <= config.seed < 1 << 63:
        raise UserError(f"lora_config: seed is {config.seed}", "give 0 or more, below 2^63")
    if not (config.train_attn or config.train_mlp or config.train_unembed):
        problem = "lora_config: train_attn, train_mlp and train_unembed are all false"
        raise UserError(problem, "train one of them")
    return LoraOptions(
        rank=config.rank,
        seed=seed if config.seed is None else config.seed,
        attention=config.train_attn,
        mlp=config.train_mlp,
        unembed=config.train_unembed,
    )


def check_optimizer(config: object) -> None:
    """Raise ``UserError`` unless a model's optimizer is AdamW, or none is named."""
    if config is not None and not isinstance(config, types.AdamOptimizerConfig):
        kind = getattr(config, "type", None)
        raise UserError(f"optimizer_config: there is no {shown(kind)} here", "train with adamw")


def step_of(message: types.OptimStepRequest) -> OptimStep:
    """Return the step that a request asks for. Raises ``UserError``."""
    params = message.optim_params
    if not isinstance(params, types.AdamParams):
        raise UserError(f"there is no optimizer {shown(params.type)} here", "give adam_params")
    for name, value in params:
        if not math.isfinite(value):
            raise UserError(f"adam_params: {name} is {value}", "give a finite number")
    return OptimStep(message.model_id, **params.model_dump())


def prompt_of(message: types.SampleRequest, snapshot: str | None, most_tokens: int) -> SamplePrompt:
    """Return the sample that a request asks for, of a context of ``most_tokens``. Raises
    ``UserError``."""
    _refuse_unknown_extras(message)
    tokens = tokens_of(message.prompt)
    params = message.sampling_params
    _check_numbers(message)
    top_k = 0 if params.top_k == -1 else params.top_k
    stop_strings, stop_ids = _stops_of(params.stop)
    return SamplePrompt(
        tokens=tokens,
        snapshot=snapshot,
        count=message.num_samples,
        max_tokens=max(1, most_tokens - len(tokens))
        if params.max_tokens is None
        else params.max_tokens,
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=top_k,
        seed=params.seed,
        stop_strings=stop_strings,
        stop_ids=stop_ids,
        top_logprobs=message.topk_sample_logprobs,
        prompt_logprobs=bool(message.prompt_logprobs),
        top_prompt_logprobs=message.topk_prompt_logprobs,
        last_prompt_tokens=message.prompt_logprobs_last_n,
        other_tokens=_others_of(message, len(tokens) - 1),
    )


def _others_of(message: types.SampleRequest, places: int) -> np.ndarray | None:
    """Return the tokens of ``target_prompt_logprobs`` at so many places, with -1 where there are
    none. Raises ``UserError``."""
    given = message.target_prompt_logprobs
    if given is None:
        return None
    name = "target_prompt_logprobs"
    shape = given.shape or []
    if given.dtype != "int64" or len(shape) != 2:
        raise UserError(f"{name} is {given.dtype} of shape {shown(shape)}", "send int64, 2-D")
    if min(shape) < 0 or shape[1] > MOST_OTHERS:
        raise UserError(f"{name}: its shape is {shown(shape)}", f"at most {MOST_OTHERS} columns")
    if shape[0] != places:
        raise UserError(
            f"{name} has {shape[0]} rows", "send one for each token of the prompt but the first"
        )
    values = np.array(given.data, np.int64)
    try:
        if given.sparse_crow_indices is None:
            return values.reshape(shape)
        begins = np.array(given.sparse_crow_indices, np.int64)
        columns = np.array(given.sparse_col_indices or [], np.int64)
        return _dense_of(values, begins, columns, (shape[0], shape[1]), -1)
    except (ValueError, IndexError):
        problem = f"{name}: its values do not fill the shape {shown(shape)}"
        raise UserError(problem, "send as many as it has places") from None


def tokens_of(prompt: types.ModelInput) -> list[int]:
    """Return the tokens of a prompt. Raises ``UserError``."""
    tokens: list[int] = []
    for chunk in prompt.chunks:
        if not isinstance(chunk, types.EncodedTextChunk):
            said = "audio" if isinstance(chunk, types.DmelChunk) else "images"
            raise UserError(f"the prompt: this server reads no {said}", "send tokens")
        tokens += chunk.tokens
    if not tokens:
        raise UserError("the prompt has no tokens", "send at least one")
    return tokens


def _refuse_unknown_extras(message: types.SampleRequest) -> None:
    if message.record_stability_info:
        problem = "record_stability_info: this server has no stable_reinforce, its only use"
        raise UserError(problem, "leave it out, and train with another loss")
    if message.prompt_alt_tokens_k:
        problem = "prompt_alt_tokens_k: this server draws no other tokens for a prompt"
        raise UserError(problem, "leave it out")


def _check_numbers(message: types.SampleRequest) -> None:
    params = message.sampling_params
    top_p = params.top_p
    last = message.prompt_logprobs_last_n
    seed = params.seed
    checks = (
        ("num_samples", message.num_samples, 1 <= message.num_samples <= MOST_SAMPLES),
        ("max_tokens", params.max_tokens, params.max_tokens is None or params.max_tokens >= 1),
        ("temperature", params.temperature, 0 <= params.temperature < math.inf),
        ("top_p", top_p, 0 < top_p <= 1),
        ("top_k", params.top_k, params.top_k >= -1),
        ("seed", seed, seed is None or 0 <= seed < 1 << 64),
        (
            "topk_sample_logprobs",
            message.topk_sample_logprobs,
            0 <= message.topk_sample_logprobs <= MOST_TOP,
        ),
        (
            "topk_prompt_logprobs",
            message.topk_prompt_logprobs,
            0 <= message.topk_prompt_logprobs <= MOST_TOP,
        ),
        ("prompt_logprobs_last_n", last, last is None or (message.prompt_logprobs and last >= 1)),
    )
    for name, value, is_right in checks:
        if not is_right:
            raise UserError(f"{name} is {value}", _BOUNDS[name])


_BOUNDS = {
    "num_samples": f"give 1 to {MOST_SAMPLES}",
    "max_tokens": "give 1 or more",
    "temperature": "give 0 or more",
    "top_p": "give more than 0, and 1 at most",
    "top_k": "give -1 for all tokens, or how many",
    "seed": "give 0 or more, below 2^64",
    "topk_sample_logprobs": f"give 0 to {MOST_TOP}",
    "topk_prompt_logprobs": f"give 0 to {MOST_TOP}",
    "prompt_logprobs_last_n": "give 1 or more, with prompt_logprobs",
}


def _stops_of(
    stop: str | Iterable[str] | Iterable[int] | None,
) -> tuple[Sequence[str], Sequence[int] | None]:
    """Return the texts and the ids that end an answer; None for the tokenizer's ends, which end
    one with texts too. ``[]`` is no end at all."""
    if stop is None:
        return (), None
    ends = [stop] if isinstance(stop, str) else list(stop)
    strings = [each for each in ends if isinstance(each, str)]
    if any(not each for each in strings):
        raise UserError("stop has an empty text", "give texts with a character")
    ids = [each for each in ends if isinstance(each, int)]
    return strings, None if strings else ids
