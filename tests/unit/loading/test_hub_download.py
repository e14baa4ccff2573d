"""A model is a directory here, or a repository that the hub gives."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardmlx.common.reporter import Reporter
from shardmlx.config.specs import ModelSource
from shardmlx.distributed.crew import Crew, lead
from shardmlx.distributed.transport import Transport
from shardmlx.errors import UserError
from shardmlx.loading import discovery, local_files
from shardmlx.loading.hub_download import find_model
from shardmlx.loading.local_files import LocalFiles
from shardmlx.loading.rank_setup import ModelWorker
from testbed.undeclared_configs import UNDECLARED
from tests.helpers.hub_server import File, Hub, serve, text_file
from tests.helpers.local_transport import LocalNetwork


def source(name: str, revision: str | None = None) -> ModelSource:
    return ModelSource(model=name, revision=revision, weights="auto", weight_cache=None)


def look_for(model: ModelSource, ranks: int) -> None:
    """Let so many ranks find a model."""

    def find(crew: Crew[ModelWorker]) -> None:
        files = crew.part(LocalFiles, "model_files")
        discovery.find_model_files(files, model, Reporter(quiet=True))

    def work(transport: Transport) -> None:
        lead(transport, ModelWorker(transport, Reporter(quiet=True)), find)

    LocalNetwork(ranks).run(work)


def test_a_directory_is_its_own_place_and_what_is_none_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    def fail(*args: object, **options: object) -> str:
        raise LocalEntryNotFoundError("no connection\nsee the log")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    assert find_model(str(tmp_path), None) == tmp_path
    (tmp_path / "config.json").touch()
    for name, revision, named in (
        (str(tmp_path / "config.json"), None, "is a file"),
        ("no/such/model", None, "no/such/model"),
        ("someone/something", None, "no connection"),
        (str(tmp_path), "v1.0", "--revision v1.0"),
    ):
        with pytest.raises(UserError) as error:
            find_model(name, revision)
        assert named in error.value.problem


def test_the_revision_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 asks the hub for it, and the cache where the hub does not answer."""
    asked = []

    def ask(name: str, revision: str | None) -> None:
        asked.append((name, revision))

    def find(name: str, revision: str | None) -> Path:
        raise UserError(f"{name} at {revision} is not in the cache")

    monkeypatch.setattr(local_files, "open_repository", ask)
    monkeypatch.setattr(discovery, "find_model", find)
    with pytest.raises(UserError, match=r"me/tiny at v1\.0 is not in the cache"):
        look_for(source("me/tiny", "v1.0"), ranks=2)
    assert asked == [("me/tiny", "v1.0")]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_model_that_cannot_run_is_refused_before_its_weights_are_downloaded(
    ranks: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import huggingface_hub.constants as constants

    weights = File(b"", 10**9, is_large=True)
    configs = {"me/new": {"model_type": "none_such"}, "me/uncut": UNDECLARED["nanbeige"]}
    repositories = {
        name: {"config.json": text_file(config), "model.safetensors": weights}
        for name, config in configs.items()
    }
    repositories["me/torch"] = {
        "config.json": text_file({"model_type": "llama"}),
        "pytorch_model.bin": weights,
    }
    messages = ["mlx-lm has no model of type 'none_such': use a", "cannot be cut into stages"]
    messages.append("has no model.*safetensors, but pytorch_model.bin")
    with serve(Hub(repositories)) as hub:
        template = f"{hub.endpoint}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "ENDPOINT", hub.endpoint)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
        for name, message in zip(repositories, messages, strict=True):
            with pytest.raises(UserError, match=message):
                look_for(source(name), ranks)
    assert any("config.json" in request for request in hub.requests)
    assert not any("safetensors" in request or ".bin" in request for request in hub.requests)
