"""One server for all tests of Tinker's API, and one client of the SDK. They end with these tests: a
server ends a session that is silent for ten minutes, and other tests may take longer."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import tinker

from tests.helpers.tinker_serving import MODEL, TinkerServing, serving_tinker


@pytest.fixture(scope="package")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinkerServing]:
    with serving_tinker(tmp_path_factory.mktemp("states")) as one:
        yield one


@pytest.fixture(scope="package")
def client(served: TinkerServing) -> Iterator[tinker.ServiceClient]:
    with served.client() as one:
        yield one


@pytest.fixture(scope="package")
def rest(client: tinker.ServiceClient) -> tinker.RestClient:
    # One of its own would keep its connections to the end of the process.
    found: tinker.RestClient = client._rest_client()
    return found


@pytest.fixture(scope="package")
def trained(client: tinker.ServiceClient) -> tinker.TrainingClient:
    return client.create_lora_training_client(MODEL, rank=4, seed=1).result()
