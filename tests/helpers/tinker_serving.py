"""A server of Tinker's API over the service of one process."""

from __future__ import annotations

import gc
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import tinker
from tinker import types

from shardmlx.api.requests import Service
from shardmlx.common.http_listener import bind, trusted_hosts
from shardmlx.common.reporter import Reporter
from shardmlx.common.uvicorn_thread import HttpServer
from shardmlx.server.app import make_app
from shardmlx.server.chat_request import ServedModel
from shardmlx.server.model_names import ModelNames
from shardmlx.server.openai_errors import NO_HTTP
from shardmlx.server.request_queue import RequestQueue
from shardmlx.server.tinker.app import tinker_routes
from testbed.jobs import patience
from tests.helpers.http_serving import Letters
from tests.helpers.loops import rows_of
from tests.helpers.one_process_service import OneProcessService

MODEL = "tiny"
KEY = "tml-sesame"
MOST_TOKENS = 256
MOST_BYTES = 1_000_000


@dataclass
class TinkerServing:
    """A server, and ways to ask it."""

    address: str
    service: Any

    def client(self) -> AbstractContextManager[tinker.ServiceClient]:
        """The SDK's client, closed at the end."""
        return sdk(self.address)

    def post(self, path: str, body: Any = None, **how: Any) -> httpx.Response:
        """Post JSON as no SDK would; ``content`` and ``headers`` are other bodies."""
        if body is not None:
            how["json"] = body
        headers = {"x-api-key": KEY, **how.pop("headers", {})}
        url = f"{self.address}/api/v1/{path}"
        return httpx.post(url, headers=headers, timeout=30, **how)

    def get(self, path: str) -> httpx.Response:
        """Get what no SDK asks for."""
        return httpx.get(f"{self.address}/api/v1/{path}", headers={"x-api-key": KEY}, timeout=30)

    def result(self, future: httpx.Response) -> httpx.Response:
        """Return the result of a request that was posted."""
        assert future.status_code == 200, future.text
        return self.post("retrieve_future", {"request_id": future.json()["request_id"]})

    def until(self, is_so: Callable[[], bool]) -> None:
        """Wait for something to be so."""
        deadline = time.monotonic() + patience(30)
        while not is_so():
            assert time.monotonic() < deadline, "it does not happen"
            time.sleep(0.005)

    def new_session(self) -> str:
        """Return a session that no SDK keeps."""
        said = {"tags": [], "user_metadata": {}, "sdk_version": "0"}
        return str(self.post("create_session", said).json()["session_id"])

    def new_sampler(self) -> str:
        """Return a sampler of the base in a session of its own."""
        said = {
            "session_id": self.new_session(),
            "sampling_session_seq_id": 0,
            "base_model": MODEL,
        }
        return str(self.post("create_sampling_session", said).json()["sampling_session_id"])

    def new_model(self) -> str:
        """Return a model in a session of its own."""
        session = self.new_session()
        said = {
            "session_id": session,
            "model_seq_id": 0,
            "base_model": MODEL,
            "lora_config": {"rank": 2},
        }
        return str(self.result(self.post("create_model", said)).json()["model_id"])


@contextmanager
def serving_tinker(directory: Path, **how: Any) -> Iterator[TinkerServing]:
    """Serve as ``serve --train`` does, over the service of one process."""
    service = OneProcessService(directory)
    try:
        with serving_service(service, **how) as address:
            yield TinkerServing(address, service)
    finally:
        service.close()


@contextmanager
def serving_service(
    service: Service, *, most_tokens: int = MOST_TOKENS, **how: Any
) -> Iterator[str]:
    """Serve a service as ``serve --train`` does; give the address."""
    listener = bind("127.0.0.1", 0)
    names = ModelNames((MODEL,))
    routes = tinker_routes(
        service,
        names,
        most_tokens=most_tokens,
        max_body_bytes=MOST_BYTES,
        reporter=Reporter(quiet=True),
        **how,
    )
    served = ServedModel(names=names, encoder=Letters(), most_tokens=MOST_TOKENS, most_requests=8)
    app = make_app(
        RequestQueue(8, lambda: None),
        served,
        api_key=KEY,
        hosts=trusted_hosts(listener),
        max_body_bytes=MOST_BYTES,
        other_routes=routes,
    )
    server = HttpServer(app, listener, no_http=NO_HTTP)
    server.start()
    try:
        yield server.address
    finally:
        server.stop(5)


@contextmanager
def sdk(address: str) -> Iterator[tinker.ServiceClient]:
    """The SDK's client, closed at the end."""
    with warnings.catch_warnings():
        # The SDK leaves the connections open by which it asks for its settings.
        warnings.simplefilter("ignore", ResourceWarning)
        one = tinker.ServiceClient(base_url=address, api_key=KEY)
        assert one.holder.get_session_id()  # it begins its session now
        one._rest_client()
        gc.collect()
    yield one
    one.close("success").result()


def data_of(step: int) -> list[types.Datum]:
    """Return the rows of a step, ``rows_of``, as the SDK has them."""
    return [
        types.Datum(
            model_input=types.ModelInput.from_ints(row["tokens"].tolist()),
            loss_fn_inputs={name: row[name] for name in ("target_tokens", "weights")},
        )
        for row in rows_of(step)
    ]


def datum(tokens: Sequence[int], **inputs: Any) -> types.Datum:
    """Return a row whose targets are the tokens after its own, each of weight 1; ``inputs`` are
    other ones."""
    given: Mapping[str, Any] = {
        "target_tokens": np.array(tokens[1:]),
        "weights": np.ones(len(tokens) - 1, np.float32),
        **inputs,
    }
    return types.Datum(
        model_input=types.ModelInput.from_ints(list(tokens[:-1])), loss_fn_inputs=dict(given)
    )
