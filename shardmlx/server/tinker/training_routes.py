"""The endpoints that train: models, their losses and steps, and what they save. No MLX, no MPI."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from tinker import types
from tinker.proto import tinker_public_pb2 as wire
from tinker.types.get_info_request import GetInfoRequest
from tinker.types.save_weights_external_response import SaveWeightsExternalResponseInternal
from tinker.types.unload_model_request import UnloadModelRequest
from tinker.types.unload_model_response import UnloadModelResponse

from shardmlx.api.requests import (
    CreateModel,
    ForwardBackward,
    LoadState,
    SavedState,
    SaveState,
    TakeSnapshot,
    UnloadModel,
)
from shardmlx.config.serve import MOST_ROWS_HELD
from shardmlx.errors import UserError
from shardmlx.server.openai_errors import ApiError, refused
from shardmlx.server.tinker.answers import Answer, as_json, loss_answer, step_answer
from shardmlx.server.tinker.checkpoints import (
    EXTERNAL,
    SAMPLER,
    TRAINING,
    new_state,
    note_of,
    path_of,
    state_of,
)
from shardmlx.server.tinker.desk import Desk, digest_of, future_response, json_response
from shardmlx.server.tinker.reading import (
    EXPANSION,
    PROTOBUF,
    check_optimizer,
    lora_of,
    loss_of,
    read_forward_backward,
    rows_of,
    settings_of,
    step_of,
    unpack,
)
from shardmlx.server.tinker.sessions import HeldSnapshot, Model, SamplingSession, StartedAnew


class TrainingRoutes:
    """The endpoints of models that train."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    @property
    def routes(self) -> list[BaseRoute]:
        """The paths that are answered."""
        answers: dict[str, Callable[[HttpRequest], Awaitable[Response]]] = {
            "create_model": self._create,
            "unload_model": self._unload,
            "get_info": self._info,
            "forward_backward": self._forward_backward,
            "optim_step": self._step,
            "save_weights": self._save,
            "save_weights_for_sampler": self._save_for_sampler,
            "save_weights_external": self._export,
            "load_weights": self._load,
        }
        return [
            Route(f"/api/v1/{path}", answer, methods=["POST"]) for path, answer in answers.items()
        ]

    # Models.

    async def _create(self, request: HttpRequest) -> Response:
        asked, digest = await self._desk.read(request, types.CreateModelRequest)
        return self._new_model(
            asked.session_id,
            asked.model_seq_id,
            digest,
            partial(self._begin_new, asked),
            lambda model: as_json(types.CreateModelResponse(model_id=model.name)),
        )

    def _begin_new(self, asked: types.CreateModelRequest, name: str) -> Awaitable[Model]:
        base = self._desk.check_base(asked.base_model)
        check_optimizer(asked.optimizer_config)
        if asked.lora_config is None:
            problem = "create_model has no lora_config: this server trains LoRAs alone"
            raise UserError(problem, "give one, as create_lora_training_client does")
        lora = lora_of(asked.lora_config, secrets.randbits(31))
        model = Model(name, asked.session_id, lora, asked.user_metadata or {}, base)
        return self._make(model, CreateModel(name, lora))

    def _new_model(
        self,
        session: str,
        number: int,
        digest: bytes,
        begin: Callable[[str], Awaitable[Model]],
        write: Callable[[Any], Answer],
    ) -> Response:
        self._desk.registry.session(session)
        name = f"{session}:train:{number}"
        promise = self._desk.promise(f"{name}:0", session, digest, partial(begin, name), write)
        return future_response(promise, model=name)

    async def _make(self, model: Model, request: CreateModel) -> Model:
        await self._desk.create(request, model.session)
        if model.session not in self._desk.registry.sessions:  # it has ended meanwhile
            await self._desk.submit(UnloadModel(model.name))
            raise UserError(f"the session {model.session} is over", "begin another one")
        self._desk.registry.models[model.name] = model
        return model

    async def _unload(self, request: HttpRequest) -> Response:
        asked, digest = await self._desk.read(request, UnloadModelRequest)
        name = asked.model_id
        promise = self._desk.promise(
            f"{name}:unload",
            name.partition(":")[0],
            digest,
            partial(self._forget, name),
            lambda result: as_json(UnloadModelResponse(model_id=name, type="unload_model")),
        )
        return future_response(promise, model=name)

    def _forget(self, name: str) -> Awaitable[Any]:
        self._desk.registry.model(name)
        del self._desk.registry.models[name]
        return self._desk.submit(UnloadModel(name))

    async def _info(self, request: HttpRequest) -> Response:
        asked, _ = await self._desk.read(request, GetInfoRequest)
        try:
            model = self._desk.registry.model(asked.model_id)
        except (UserError, StartedAnew) as error:
            raise ApiError(404, str(error)) from None
        return json_response(
            types.GetInfoResponse(
                type="get_info",
                model_data=types.ModelData(
                    model_name=model.base_model, tokenizer_id=self._desk.tokenizer
                ),
                model_id=model.name,
                is_lora=True,
                lora_rank=model.lora.rank,
                model_name=model.base_model,
            )
        )

    # Losses and steps.

    async def _forward_backward(self, request: HttpRequest) -> Response:
        encoding = request.headers.get("content-encoding", "").strip().lower()
        most = self._desk.bodies.most_bytes
        if self._desk.promises.held_bytes > MOST_ROWS_HELD * most:
            text = "too many rows wait to be computed: send these again when some are"
            raise ApiError(429, text, headers={"retry-after": "1"})

        read = partial(_read_losses, encoding, most)
        message, digest, nbytes = await self._desk.bodies.read(request, read, PROTOBUF)
        # Rows are read on a thread of their own, though they may be refused only later: their
        # request's number must be known before.
        made: ForwardBackward | UserError
        try:
            made = await asyncio.to_thread(self._loss_request, message)
        except UserError as error:
            made = error
        return self._desk.queue(
            message.model_id,
            message.seq_id,
            digest,
            partial(_unless_refused, made),
            loss_answer,
            nbytes,
        )

    def _loss_request(self, message: wire.ForwardBackwardRequest) -> ForwardBackward:
        return ForwardBackward(
            message.model_id,
            rows_of(message, EXPANSION * self._desk.bodies.most_bytes),
            loss_of(message),
            settings_of(message),
            forward_only=message.forward_only,
        )

    async def _step(self, request: HttpRequest) -> Response:
        asked, digest = await self._desk.read(request, types.OptimStepRequest)
        return self._desk.queue(
            asked.model_id, asked.seq_id, digest, lambda model: step_of(asked), step_answer
        )

    # Saved states.

    async def _save(self, request: HttpRequest) -> Response:
        asked, digest = await self._desk.read(request, types.SaveWeightsRequest)
        self._tell_ttl(asked.ttl_seconds)
        make = partial(_training_state, asked)
        return self._desk.queue(asked.model_id, asked.seq_id, digest, make, _saved_answer)

    async def _save_for_sampler(self, request: HttpRequest) -> Response:
        asked, digest = await self._desk.read(request, types.SaveWeightsForSamplerRequest)
        if asked.path is None:
            return self._snapshot(asked, digest)
        self._tell_ttl(asked.ttl_seconds)
        make = partial(_sampler_state, asked, asked.path)
        return self._desk.queue(asked.model_id, asked.seq_id, digest, make, _sampler_answer)

    def _snapshot(self, asked: types.SaveWeightsForSamplerRequest, digest: bytes) -> Response:
        """Answer with the future of a snapshot in memory, and of a sampler of it."""
        session = asked.model_id.partition(":")[0]
        name = f"{session}:sample:{asked.sampling_session_seq_id}"
        answer = types.SaveWeightsForSamplerResponseInternal(
            sampling_session_id=name, type="save_weights_for_sampler"
        )
        make = partial(self._new_sampler, asked)
        return self._desk.queue(
            asked.model_id, asked.seq_id, digest, make, lambda result: as_json(answer)
        )

    def _new_sampler(self, asked: types.SaveWeightsForSamplerRequest, model: Model) -> TakeSnapshot:
        """Make a sampler of a snapshot that is to be taken; return the request for that."""
        _refuse_inflight(asked)
        registry = self._desk.registry
        if asked.sampling_session_seq_id is None:
            problem = "sampling_session_seq_id: a snapshot without a path needs one"
            raise UserError(problem, "give it, or a path")
        name = f"{model.session}:sample:{asked.sampling_session_seq_id}"
        if name in registry.samplers:
            raise UserError(f"there is a sampler {name} already", "number them one by one")
        snapshot = HeldSnapshot(name)
        registry.snapshots[name] = snapshot
        registry.samplers[name] = SamplingSession(name, model.session, model.base_model, snapshot)
        return TakeSnapshot(name, model.name)

    async def _export(self, request: HttpRequest) -> Response:
        asked, digest = await self._desk.read(request, types.SaveWeightsExternalRequest)
        self._tell_ttl(asked.ttl_seconds)
        make = partial(_external_state, asked)
        return self._desk.queue(asked.model_id, asked.seq_id, digest, make, _external_answer)

    async def _load(self, request: HttpRequest) -> Response:
        asked, digest = await self._desk.read(request, types.LoadWeightsRequest)
        if asked.session_id is not None and asked.model_seq_id is not None:
            name = f"{asked.session_id}:train:{asked.model_seq_id}"
            return self._new_model(
                asked.session_id,
                asked.model_seq_id,
                digest,
                partial(self._begin_loaded, asked, asked.session_id),
                lambda model: _loaded_answer(asked.path, name),
            )
        if asked.model_id is None:
            raise ApiError(400, "load_weights has neither model_id nor session_id: give one")
        model_id = asked.model_id
        make = partial(_load_request, asked)
        return self._desk.queue(
            model_id,
            asked.seq_id,
            digest,
            make,
            lambda result: _loaded_answer(asked.path, model_id),
        )

    def _begin_loaded(
        self, asked: types.LoadWeightsRequest, session: str, name: str
    ) -> Awaitable[Model]:
        base = self._desk.check_base(asked.base_model)
        _check_load(asked)
        request = CreateModel(name, state=state_of(asked.path), with_optimizer=asked.optimizer)
        return self._make_loaded(request, session, base, asked.user_metadata or {})

    async def _make_loaded(
        self, request: CreateModel, session: str, base: str, metadata: dict[str, Any]
    ) -> Model:
        saved = await self._desk.saved(request.state or "")
        model = Model(request.name, session, saved.lora, metadata, base)
        return await self._make(model, request)

    def _tell_ttl(self, seconds: int | None) -> None:
        if seconds is not None and seconds < 1:
            raise refused(f"ttl_seconds is {seconds}: give 1 or more, or leave it out")
        if seconds is not None:
            self._desk.say_once(
                "A client gave saved weights a time to live: it is not kept, and they stay until "
                "a client deletes them"
            )


def _read_losses(
    encoding: str, most: int, body: bytes
) -> tuple[wire.ForwardBackwardRequest, bytes, int]:
    """Return a request's message, its digest and its bytes. Raises ``ApiError``."""
    unpacked = unpack(body, encoding, most)
    return read_forward_backward(unpacked), digest_of(unpacked), len(unpacked)


def _unless_refused(made: ForwardBackward | UserError, model: Model) -> ForwardBackward:
    if isinstance(made, UserError):
        raise made
    return made


def _training_state(asked: types.SaveWeightsRequest, model: Model) -> SaveState:
    name = f"{asked.seq_id or 0:06d}" if asked.path is None else asked.path
    return SaveState(
        model.name,
        new_state(model.name, TRAINING, name),
        overwrite=asked.overwrite,
        note=_note(asked.user_metadata, model),
    )


def _sampler_state(asked: types.SaveWeightsForSamplerRequest, name: str, model: Model) -> SaveState:
    _refuse_inflight(asked)
    return SaveState(
        model.name,
        new_state(model.name, SAMPLER, name),
        for_sampler=True,
        note=_note(asked.user_metadata, model),
    )


def _external_state(asked: types.SaveWeightsExternalRequest, model: Model) -> SaveState:
    if asked.age_encryption_recipients:
        problem = "age_encryption_recipients: this server encrypts no files with age"
        raise UserError(problem, "leave it out: files stay on this server's machines")
    return SaveState(
        model.name,
        new_state(model.name, EXTERNAL, asked.path),
        for_sampler=True,
        note=_note(None, model),
    )


def _load_request(asked: types.LoadWeightsRequest, model: Model) -> LoadState:
    _check_load(asked)
    return LoadState(model.name, state_of(asked.path), with_optimizer=asked.optimizer)


def _note(user_metadata: dict[str, str] | None, model: Model) -> dict[str, Any]:
    return note_of(
        user_metadata, {"user_metadata": model.user_metadata, "base_model": model.base_model}
    )


def _refuse_inflight(asked: types.SaveWeightsForSamplerRequest) -> None:
    if asked.kind != "snapshot":
        problem = f"there are no {asked.kind} sampling clients here: weights do not change in them"
        raise UserError(problem, "take the kind snapshot")


def _check_load(asked: types.LoadWeightsRequest) -> None:
    check_optimizer(asked.optimizer_config)
    if asked.weights_access_token is not None:
        problem = "weights_access_token: this server has no accounts"
        raise UserError(problem, "leave it out: whoever has its key loads all states")


def _saved_answer(saved: SavedState) -> Answer:
    return as_json(types.SaveWeightsResponse(path=path_of(saved.state), type="save_weights"))


def _sampler_answer(saved: SavedState) -> Answer:
    return as_json(
        types.SaveWeightsForSamplerResponseInternal(
            path=path_of(saved.state), type="save_weights_for_sampler"
        )
    )


def _external_answer(saved: SavedState) -> Answer:
    return as_json(
        SaveWeightsExternalResponseInternal(
            path=path_of(saved.state), size_bytes=saved.nbytes, type="save_weights_external"
        )
    )


def _loaded_answer(path: str, model: str) -> Answer:
    return as_json(types.LoadWeightsResponse(path=path, model_id=model, type="load_weights"))
