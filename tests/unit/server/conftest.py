"""One server for the tests of every API that knows thoughts and tools."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from tests.helpers.http_serving import KEY, Agent, Serving, serving


@pytest.fixture(scope="session")
def agent() -> Agent:
    return Agent()


@pytest.fixture(scope="session")
def served(agent: Agent) -> Iterator[Serving]:
    with serving(encoder=agent, api_key=KEY, complaint=lambda grammar: "") as one:
        yield one


@pytest.fixture(scope="session")
def client(served: Serving) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.address}/v1", api_key=KEY, max_retries=0) as one:
        yield one
