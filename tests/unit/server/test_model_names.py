"""By what names the model is known to its clients."""

from pathlib import Path

import pytest

from shardmlx.config.serve import LINE
from shardmlx.server.model_names import ModelNames, names_of, own_name
from shardmlx.server.openai_errors import ApiError


def test_a_directorys_name_is_the_models_and_its_path_is_understood_but_not_shown(
    tmp_path: Path,
) -> None:
    path = tmp_path / "mistral-7b"
    path.mkdir()
    names = names_of(str(path), [], any_name=False)
    assert names.listed == ("mistral-7b",)
    for name in ("mistral-7b", str(path), "default", "default_model", None):
        names.check(name)
    with pytest.raises(ApiError, match=r"^the model 'gpt-5' is not .*: ask for 'mistral-7b'$"):
        names.check("gpt-5")


def test_a_repositorys_name_is_the_models_also_in_the_hubs_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert own_name("mistralai/Mistral-7B-v0.3") == "mistralai/Mistral-7B-v0.3"
    path = tmp_path / "models--mistralai--Mistral-7B-v0.3/snapshots/0123abc"
    path.mkdir(parents=True)
    assert own_name(str(path)) == "mistralai/Mistral-7B-v0.3"
    monkeypatch.chdir(tmp_path)
    assert own_name(".") == tmp_path.name


def test_names_that_are_given() -> None:
    config = LINE.load(["--served-model-name", "gpt-4o", "small", "--model", "a/b"])
    names = names_of(config.source.model, config.served_model_name, any_name=config.any_model_name)
    assert names == ModelNames(("gpt-4o", "small"), frozenset({"default", "default_model", "a/b"}))
    with pytest.raises(ApiError, match="ask for 'gpt-4o' or 'small'"):
        names.check("b")


def test_any_name() -> None:
    config = LINE.load(["--any-model-name"])
    names_of(config.source.model, [], any_name=config.any_model_name).check("gpt-5")
