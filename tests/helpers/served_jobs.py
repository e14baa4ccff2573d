"""A server in a job of its own, and its clients."""

from __future__ import annotations

import re
import time

import httpx
import openai
import pytest

from testbed.jobs import Running, patience

SECONDS_TO_START = 60.0
KEY = "tml-a-key"


class Served:
    """A server that answers, and its clients."""

    def __init__(self, running: Running) -> None:
        self.running = running
        self.url = self._address()
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key=KEY, max_retries=0)

    def _address(self) -> str:
        end = time.monotonic() + patience(SECONDS_TO_START)
        while time.monotonic() < end and self.running.process.poll() is None:
            if found := re.search(r"^Serving .* at (http://\S+)", self.running.job().stdout, re.M):
                return found[1]
            time.sleep(0.1)
        pytest.fail(f"no server\n{self.running.where_it_hangs().output}")

    def ask(self, said: str, tokens: int = 12) -> str:
        pieces = self.client.chat.completions.create(
            model="default",
            messages=[{"role": "user", "content": said}],
            max_tokens=tokens,
            stream=True,
        )
        return "".join(piece.choices[0].delta.content or "" for piece in pieces)

    def health(self) -> tuple[int, str]:
        """Status and reason; 0 where nobody listens."""
        try:
            answer = httpx.get(f"{self.url}/health")
        except httpx.TransportError:
            return 0, ""
        return answer.status_code, answer.json().get("reason", "")

    def metric(self, name: str) -> float:
        text = httpx.get(f"{self.url}/metrics", headers={"Authorization": f"Bearer {KEY}"}).text
        found = re.search(rf"^shardmlx_{name} (\S+)$", text, re.M)
        assert found, text
        return float(found[1])
