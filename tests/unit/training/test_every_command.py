"""Whatever command a rank fails at, all ranks end in time, and nothing that was saved is lost."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import CodeType
from typing import Any

import pytest

from shardmlx.api.client import train_client
from shardmlx.checkpoint.store import Store
from shardmlx.common.environment import Blas
from shardmlx.config.doctor import DoctorConfig
from shardmlx.config.inference import EVALUATE, GENERATE
from shardmlx.config.train import TrainConfig
from shardmlx.distributed.agreement import AgreedError
from shardmlx.distributed.transport import Transport
from shardmlx.errors import UserError
from shardmlx.evaluation import command as evaluation
from shardmlx.hosts import doctor_mpi
from shardmlx.inference import generate
from shardmlx.islands.client import TOKEN
from shardmlx.training.command import train_model
from testbed.jobs import SECONDS_TO_END, patience
from testbed.rows import write
from testbed.small_models import small_directory
from tests.helpers.commands import at_calls, commands, failing_at
from tests.helpers.island_hub import running_hub
from tests.helpers.local_transport import LocalNetwork, LocalTransport
from tests.helpers.models_and_batches import load_arrays
from tests.helpers.preference_data import preference_directory

pytestmark = pytest.mark.usefixtures("limited_to_a_test")

RANKS = 2
RUNS = 5
"""At most, until one gives a command: nothing waits for a checkpoint that is written at once."""
NO_BLAS = Blas("none")

Work = Callable[[Transport], None]

ELSEWHERE = {
    # MLX has one group a process: tests/mpi/test_tensor_shares.py.
    *("ModelWorker.join_group", "TrainWorker.share_layers"),
    # They serve: tests/unit/server, tests/mpi/test_serve_train.py.
    *("InferenceWorker.content", "InferenceWorker.prefix_faults", "InferenceWorker.limit_silence"),
    *("InferenceWorker.open_prefix_files", "AnswersWorker.takes_grammars", "AnswersWorker.keep_to"),
    # After ten minutes without a command.
    "LoopWorker.keep_alive",
    # A model that drafts by its own head: tests/unit/inference.
    "InferenceWorker.build_head",
    # Models of the hub: tests/unit/loading.
    *("LocalFiles.take_whole", "LocalFiles.use", "LocalFiles.enter"),
    # It ends the process: tests/lab.
    "DoctorWorker.abort",
    # They take long, and save nothing: tests/unit/training/test_profiling.py.
    *("ProfileWorker.build", "ProfileWorker.time_frozen", "ProfileWorker.unfreeze"),
    *("ProfileWorker.measure", "ProfileWorker.measure_selective", "ProfileWorker.machine"),
}
"""Commands that no run here gives, and where they are tested."""


class Runs:
    """Runs in which all commands are given: each is what a rank does, in a directory of its own."""

    def __init__(self, model: Path, data: Path, place: Path) -> None:
        self._places = {"model": str(model), "data": str(data)}
        self._pairs = str(preference_directory(place, data) / "pairs")
        self._text = write(place / "text", test=[{"text": "hello ships"}])
        self.saved = place / "saved"
        LocalNetwork(RANKS, timeout=20.0).run(
            lambda rank: train_model(self._options(self.saved, iters=2), rank)
        )

    def _options(self, directory: Path, **more: Any) -> TrainConfig:
        given: dict[str, Any] = {
            **self._places,
            "adapter_path": str(directory / "out"),
            "checkpoint_dir": str(directory / "kept"),
            "num_layers": -1,
            "max_seq_length": 16,
            "val_batches": 1,
            "test_batches": 1,
            "batch_size": 2,
            "checkpoint_every": 2,
            "steps_per_report": 2,
            "keep": "best",
            "pipeline_stages": RANKS,
        }
        return TrainConfig.from_flat(**{**given, **more})

    def train(self, directory: Path) -> Work:
        trace = str(directory / "trace.json")
        how = {"on_nan": "skip", "trace": trace, "train": True, "test": True}
        config = self._options(directory, iters=4, **how)
        return lambda rank: train_model(config, rank)

    def load(self, directory: Path) -> Work:
        config = self._options(directory, iters=4, weights="rank0")
        return lambda rank: train_model(config, rank)

    def prefer(self, directory: Path) -> Work:
        how = {"objective": "dpo", "data": self._pairs, "checkpoint_dir": None}
        config = self._options(directory / "new", iters=2, **how)
        return lambda rank: train_model(config, rank)

    def join(self, directory: Path) -> Work:
        url = (directory / "url").read_text()
        how = {"island": url, "name": "ann", "checkpoint_dir": None, "keep": "last"}
        config = self._options(directory / "new", iters=2, **how)
        return lambda rank: train_model(config, rank)

    def generate(self, directory: Path) -> Work:
        config = GENERATE.load(["--model", self._places["model"], "--max-tokens", "2"])
        return lambda rank: generate.run(config, rank, NO_BLAS)

    def evaluate(self, directory: Path) -> Work:
        model = self._places["model"]
        config = EVALUATE.load(["--model", model, "--data", self._text, "--batch-size", "1"])
        return lambda rank: evaluation.run(config, rank, NO_BLAS)

    def examine(self, directory: Path) -> Work:
        config = DoctorConfig(seconds=0.01, self_test=True)

        def work(transport: Transport) -> None:
            transport.hosts = ("mac1", "mac2")
            doctor_mpi.run(config, transport, NO_BLAS)

        return work

    def loop(self, directory: Path) -> Work:
        options: dict[str, Any] = {"model": self._places["model"], "max_train_length": 16}
        options["state_dir"] = str(directory / "states")

        def work(transport: Transport) -> None:
            with train_client(transport, quiet=True, **options) as client:
                if client is None:
                    return
                model = client.create_model(rank=2)
                model.forward_backward([{"tokens": [1, 2, 3], "target_tokens": [2, 3, 4]}])
                model.optim_step().result()
                model.save("a")
                model.load("a", with_optimizer=False)
                snapshot = model.snapshot()
                client.sample([1, 2], snapshot, max_tokens=2, prompt_logprobs=True).result()
                client.drop_snapshot(snapshot)
                model.unload()

        return work

    def by_name(self) -> dict[str, Callable[[Path], Work]]:
        """Return all runs, the shortest first."""
        return {
            each.__name__: each
            for each in (
                *(self.generate, self.evaluate, self.load, self.prefer, self.train, self.join),
                *(self.examine, self.loop),
            )
        }


@pytest.fixture(scope="module")
def runs(small_tokenizer: Path, pirate: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    directory = tmp_path_factory.mktemp("runs")
    model = small_directory(directory / "model", small_tokenizer, num_hidden_layers=RANKS)
    return Runs(model, pirate, directory)


@contextmanager
def prepared(
    runs: Runs, name: str, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Work]:
    """Give what each rank does in a run, with what an earlier one has saved."""
    shutil.copytree(runs.saved, directory)
    if name != "join":
        yield runs.by_name()[name](directory)
        return
    with running_hub(directory / "hub", "ann", inner_steps=1) as hub:
        monkeypatch.setenv(TOKEN, hub.tokens["ann"])
        (directory / "url").write_text(hub.url)
        yield runs.join(directory)


@pytest.fixture(scope="module")
def reached(runs: Runs, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The run that gives a command first, by the command."""
    codes = {method.__code__: name for name, method in commands().items()}
    found: dict[str, str] = {}
    for name in runs.by_name():
        directory = tmp_path_factory.mktemp("reached") / name

        def seen(code: CodeType, name: str = name) -> None:
            if code in codes:
                found.setdefault(codes[code], name)

        with pytest.MonkeyPatch.context() as patch, prepared(runs, name, directory, patch) as work:

            def rank(transport: LocalTransport) -> None:
                with at_calls(seen):
                    work(transport)

            LocalNetwork(RANKS, timeout=20.0).run(rank)
    return found


def test_all_commands_are_given_in_these_runs(reached: Mapping[str, str]) -> None:
    assert {*commands()} - reached.keys() == ELSEWHERE


REFUSAL = UserError("the disk is full", "free some of it")
FAULT = RuntimeError("Insufficient Memory")

LED = {"InferenceWorker.follow", "SamplingWorker.follow"}
"""Commands that rank 0 leads by other messages, and does not carry out itself."""


def is_answer(command: str) -> bool:
    """Tell whether a refusal at a command is its answer. Where ranks wait for each other, it ends
    the job instead, as any other error does."""
    return command not in LED and not hasattr(commands()[command], "is_together")


def failed(work: Work, command: str, rank: int, error: Exception) -> list[BaseException]:
    """Let a rank fail at a command; return the errors of all ranks, as they come: none if the run
    did not give the command. All have ended in time."""
    errors: list[BaseException] = []
    began: list[float] = []

    def fail() -> None:
        began.append(time.monotonic())
        raise error

    def body(transport: LocalTransport) -> None:
        try:
            if transport.rank == rank:
                with failing_at(commands()[command].__code__, fail):
                    work(transport)
            else:
                work(transport)
        except BaseException as raised:
            errors.append(raised)
            if not isinstance(raised, AgreedError):
                raise

    network = LocalNetwork(RANKS, timeout=20.0)
    with suppress(RuntimeError, UserError):
        network.run(body)
    ended = time.monotonic()
    network.abort()  # here the threads that write checkpoints do not end with a process
    for thread in threading.enumerate():
        if thread.name == "checkpoint":
            thread.join(patience(SECONDS_TO_END))
    for start in began:
        assert ended - start < patience(SECONDS_TO_END)
    return errors


def check_kept(directory: Path) -> None:
    """Check that what was saved before, or since, is whole, and that other runs may go on."""
    assert load_arrays(directory / "out" / "adapters.safetensors")
    store = Store(directory / "kept")
    steps = store.steps()
    assert steps
    assert set(steps) <= {2, 4}
    for step in steps:
        assert not any(store.fault(step, file) for file in store.manifest(step).files)
    store.lock().release()


@pytest.mark.parametrize("command", sorted(commands().keys() - ELSEWHERE))
def test_an_error_at_a_command_ends_all_ranks_and_loses_nothing(
    command: str,
    runs: Runs,
    reached: Mapping[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ranks = [1] if command in LED else [0, 1]
    is_refused_first = sum(map(ord, command)) % 2 == 0
    for rank in ranks:
        is_refused = (rank == 0) == is_refused_first
        error = REFUSAL if is_refused else FAULT
        for directory in (tmp_path / f"{rank}-{run}" for run in range(RUNS)):
            with prepared(runs, reached[command], directory, monkeypatch) as work:
                errors = failed(work, command, rank, error)
            if errors:
                break
        assert errors, f"no run gave {command}"
        if is_refused and is_answer(command):
            where = "" if rank == 0 else f"rank {rank} on "
            assert len(errors) == RANKS
            for each in errors:
                assert isinstance(each, AgreedError)
                assert each.problem.startswith(where)
                assert each.problem.endswith(REFUSAL.problem)
                assert each.remedy == REFUSAL.remedy
        else:
            assert errors[0] is error
        check_kept(directory)
