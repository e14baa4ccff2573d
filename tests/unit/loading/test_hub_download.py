"""A model is a directory here, or a repository that the hub gives."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardmlx.errors import UserError
from shardmlx.loading.hub_download import find_model


def test_a_directory_is_its_own_place(tmp_path: Path) -> None:
    assert find_model(str(tmp_path)) == tmp_path


def test_a_file_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()
    with pytest.raises(UserError, match=r"is a file: name the directory that holds config\.json"):
        find_model(str(tmp_path / "config.json"))


def test_a_path_that_is_no_repository_either() -> None:
    with pytest.raises(UserError, match="no directory no/such/model here, and it is no Hugging"):
        find_model("no/such/model")


def test_a_repository_that_the_hub_does_not_give(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    def fail(*args: object, **options: object) -> str:
        raise LocalEntryNotFoundError("no connection\nsee the log")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(UserError) as error:
        find_model("someone/something")
    assert str(error.value) == (
        "there is no directory someone/something here, and the hub does not give "
        "someone/something: no connection: try again"
    )
