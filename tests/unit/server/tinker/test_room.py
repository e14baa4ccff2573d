"""Room for another model, where clients went away without a word."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardmlx.server.tinker import desk, sessions
from tests.helpers.tinker_serving import serving_tinker

SILENCE = 0.4


def test_a_client_that_is_silent_makes_room_for_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(desk, "SECONDS_OF_HEARTBEAT", SILENCE / 2)
    monkeypatch.setattr(desk, "SECONDS_TO_MAKE_ROOM", SILENCE)
    with serving_tinker(tmp_path) as served:
        served.service.most_models = 1
        lost = served.new_model()
        new = served.new_model()
        assert served.post("get_info", {"model_id": lost}).status_code == 404
        assert served.post("get_info", {"model_id": new}).json()["model_id"] == new
        session = lost.partition(":")[0]
        assert served.post("session_heartbeat", {"session_id": session}).status_code == 410


def test_a_client_that_is_silent_for_long_loses_its_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(desk, "SECONDS_BETWEEN_LOOKS", SILENCE / 4)
    monkeypatch.setattr(sessions, "SECONDS_OF_SILENCE", SILENCE)
    with serving_tinker(tmp_path) as served:
        lost = served.new_model()
        served.until(lambda: served.post("get_info", {"model_id": lost}).status_code == 404)
        assert served.new_model() != lost
