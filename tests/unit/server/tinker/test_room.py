"""Room for another model, where clients went away without a word."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from shardmlx.server.tinker import desk
from shardmlx.server.tinker.sessions import Registry, Session
from tests.helpers.one_process_service import MOST_SNAPSHOTS
from tests.helpers.tinker_serving import MODEL, serving_tinker

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
    is_made = threading.Event()
    silent = Registry.silent

    def silent_once_made(registry: Registry, *given: float) -> Sequence[Session]:
        return silent(registry, *given) if is_made.is_set() else []

    monkeypatch.setattr(Registry, "silent", silent_once_made)
    # Of this server alone: the one of all these tests would end its own client's session.
    with serving_tinker(tmp_path, seconds_of_silence=SILENCE) as served:
        lost = served.new_model()
        is_made.set()
        served.until(lambda: served.post("get_info", {"model_id": lost}).status_code == 404)
        is_made.clear()
        assert served.new_model() != lost


def test_a_model_that_is_made_while_its_client_leaves_takes_no_room(tmp_path: Path) -> None:
    with serving_tinker(tmp_path) as served:
        served.service.most_models = 1
        session = served.new_session()
        served.service.ends.clear()
        asked = {"session_id": session, "model_seq_id": 0, "base_model": MODEL}
        served.post("create_model", {**asked, "lora_config": {"rank": 2}})
        served.until(lambda: any(each.running() for each in served.service.submitted))
        assert served.post(f"sessions/{session}/finish", {}).status_code == 204
        served.service.ends.set()
        assert served.new_model()


def test_a_snapshot_that_is_loaded_while_its_client_cancels_is_there(tmp_path: Path) -> None:
    with serving_tinker(tmp_path) as served:
        model = served.new_model()
        saved = {"model_id": model, "seq_id": 1, "path": "kept"}
        path = served.result(served.post("save_weights_for_sampler", saved)).json()["path"]
        asked = {"session_id": model.partition(":")[0], "model_path": path}
        sampler = served.post("create_sampling_session", {**asked, "sampling_session_seq_id": 7})
        params = {"max_tokens": 1}
        sample = {
            "sampling_session_id": sampler.json()["sampling_session_id"],
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": [10, 11]}]},
            "sampling_params": params,
        }
        other = served.new_model()
        for number in range(MOST_SNAPSHOTS):  # which make it leave
            taken = {"model_id": other, "seq_id": 1 + number, "sampling_session_seq_id": number}
            assert served.result(served.post("save_weights_for_sampler", taken)).is_success
        served.post(f"sessions/{other.partition(':')[0]}/finish", {})
        served.until(lambda: all(each.done() for each in served.service.submitted))

        served.service.ends.clear()
        before = len(served.service.submitted)
        future = served.post("asample", {**sample, "seq_id": 0}).json()["request_id"]
        served.until(lambda: any(each.running() for each in served.service.submitted[before:]))
        assert served.post("cancel_future", {"request_id": future}).status_code == 204
        served.service.ends.set()
        answered = served.result(served.post("asample", {**sample, "seq_id": 1}))
        assert "error" not in answered.text
