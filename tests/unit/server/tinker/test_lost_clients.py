"""A client that dies without a word: what it asked for ends, and others do not notice."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import tinker
from tinker import types

from shardmlx.api.client import TrainClient
from shardmlx.api.requests import Request, SamplePrompt, SavedState
from shardmlx.api.sampling import Sampler
from shardmlx.api.service import TrainService
from shardmlx.server.tinker import desk
from testbed.jobs import patience
from tests.helpers.loops import ATTENTION, MLP, RATE, on_ranks, oracle
from tests.helpers.tinker_serving import KEY, MODEL, data_of, sdk, serving_service, serving_tinker

pytestmark = pytest.mark.usefixtures("limited_to_a_test")

SILENCE = 1.0
STEPS = 3
SECONDS = 60.0

SAMPLES = """
import sys, tinker
from tinker import types
client = tinker.ServiceClient(base_url=sys.argv[1], api_key=sys.argv[2])
sampler = client.create_sampling_client(base_model=sys.argv[3])
prompt = types.ModelInput.from_ints([10, 11, 12])
sampler.sample(prompt, 400, types.SamplingParams(max_tokens=500, stop=[])).result()
"""


class Watched:
    """A service, and the futures of the samples that were asked of it."""

    def __init__(self, service: TrainService) -> None:
        self._service = service
        self.samples: list[Future[Any]] = []
        self.has_sample = threading.Event()
        self.has_ended = threading.Event()

    def submit(self, request: Request) -> Future[Any]:
        future = self._service.submit(request)
        if isinstance(request, SamplePrompt):
            self.samples.append(future)
            future.add_done_callback(lambda _: self.has_ended.set())
            self.has_sample.set()
        return future

    def states(self) -> Sequence[SavedState]:
        return self._service.states()

    def export(self, state: str) -> bytes:
        return self._service.export(state)


def until_idle(sampler: Sampler) -> None:
    """Wait until nothing is sampled."""
    end = time.monotonic() + patience(SECONDS)
    while not sampler.is_idle:
        assert time.monotonic() < end, "it goes on to sample"
        time.sleep(0.01)


def losses_of(
    client: tinker.ServiceClient,
    watched: Watched,
    killed: subprocess.Popen[str],
    shorten_silence: Callable[[], None],
) -> Any:
    """The losses of steps of a client, while another is killed in the midst of a sample. Until then
    silence is long: a client that lives and waits for its sample says nothing either."""
    model = client.create_lora_training_client(MODEL, rank=4, seed=0).result()
    adam = types.AdamParams(learning_rate=RATE, weight_decay=0.01, grad_clip_norm=2.0)
    losses = []
    for step in range(STEPS):
        loss = model.forward_backward(data_of(step), "cross_entropy")
        model.optim_step(adam).result()
        losses.append(loss.result().metrics["loss:sum"])
        if step == 0:
            assert watched.has_sample.wait(patience(SECONDS)), "no sample of the other client"
            assert not watched.samples[0].done()
            killed.send_signal(signal.SIGKILL)
            shorten_silence()
    assert watched.has_ended.wait(patience(SECONDS)), "the sample of a dead client goes on"
    return losses


def test_the_samples_of_a_client_that_is_killed_end_and_others_curves_are_undisturbed(
    small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(desk, "SECONDS_BETWEEN_LOOKS", SILENCE / 4)
    found: list[Any] = []

    def shorten_silence() -> None:
        monkeypatch.setattr(desk, "SECONDS_TO_MAKE_ROOM", SILENCE)

    def work(loop: TrainClient) -> bool:
        service = loop.service
        sampler = service.sampler
        assert sampler is not None
        watched = Watched(service)
        with serving_service(watched, most_tokens=sampler.context) as address:
            command = [sys.executable, "-c", SAMPLES, address, KEY, MODEL]
            with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as killed:

                def ask() -> None:
                    try:
                        with sdk(address) as client:
                            found.append(losses_of(client, watched, killed, shorten_silence))
                        until_idle(sampler)
                    finally:
                        killed.kill()
                        service.close("the test is over")

                thread = threading.Thread(target=ask)
                thread.start()
                service.run()
                thread.join()
        return sampler.is_idle and all(each.cancelled() for each in watched.samples)

    assert on_ranks(2, small, work) is True
    expected = oracle(small, (*ATTENTION, *MLP, "lm_head"), steps=STEPS)
    assert found == [pytest.approx(expected, rel=1e-5)]


def test_a_client_that_is_heard_again_is_told_to_repeat_its_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(desk, "SECONDS_BETWEEN_LOOKS", SILENCE / 4)
    monkeypatch.setattr(desk, "SECONDS_TO_MAKE_ROOM", SILENCE)
    with serving_tinker(tmp_path) as served:
        name = served.new_sampler()
        sample = {
            "sampling_session_id": name,
            "seq_id": 0,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": [10, 11]}]},
            "sampling_params": {"max_tokens": 1},
        }
        served.service.holds.clear()
        asked = {"request_id": served.post("asample", sample).json()["request_id"]}
        served.until(lambda: served.service.submitted[-1].cancelled())
        assert served.post("retrieve_future", asked).status_code == 410
        target = {"sampling_session_id": name, "cloned_sampler_id": 0}
        ended = served.post("retrieve_futures", {"target": target, "prev_cursor": 0}).json()
        assert [each["request_id"] for each in ended["completions"]] == [asked["request_id"]]
        monkeypatch.setattr(desk, "SECONDS_TO_MAKE_ROOM", 3600.0)
        served.service.holds.set()
        assert served.result(served.post("asample", sample)).status_code == 200
