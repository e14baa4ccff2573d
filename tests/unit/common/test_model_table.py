"""The table of transformers' models is made once, and is the same from its file."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardmlx.common import model_table
from shardmlx.common.model_table import Table, keep_model_table

TABLE: Table = {
    frozenset(): {"auto.tokenization_auto": {"AutoTokenizer"}, "llama.configuration": {"A", "B"}},
    frozenset({"torch", "vision"}): {"llama.modeling": {"C"}},
}
MODELS = Path("/packages/transformers/models")


class Making:
    """Makes tables, and says which."""

    def __init__(self) -> None:
        self.made: list[str] = []

    def __call__(self, path: Path | str, prefix: str | None = None) -> Table:
        self.made.append(str(path))
        return {needs: dict(modules) for needs, modules in TABLE.items()}


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., tuple[Any, Making]]:
    """What a process calls that starts with this directory, and what it makes by itself."""

    def start(directory: Callable[[], Path] = lambda: tmp_path / "imports") -> tuple[Any, Making]:
        wraps: list[Callable[..., Any]] = []
        monkeypatch.setattr(model_table, "wrap_table_of_transformers", wraps.append)
        keep_model_table(directory)
        making = Making()
        return wraps[0](making), making

    return start


def test_it_is_made_once(start: Any) -> None:
    for made in ([str(MODELS)], []):
        define, making = start()
        assert define(str(MODELS / "__init__.py")) == TABLE
        assert define(MODELS, prefix="models")[frozenset({"torch", "vision"})] == {
            "models.llama.modeling": {"C"}
        }
        assert making.made == made


def test_another_place_and_another_version_have_their_own(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    start()[0](MODELS)
    define, making = start()
    define(Path("/elsewhere/transformers/models"))
    assert making.made == ["/elsewhere/transformers/models"]
    monkeypatch.setattr("importlib.metadata.version", lambda name: "99.0")
    define(MODELS)
    assert making.made[1:] == [str(MODELS)]
    monkeypatch.setattr("importlib.metadata.version", lambda name: "99.1.dev0")
    define(MODELS)
    define(MODELS)
    assert making.made[2:] == 2 * [str(MODELS)]


def test_packages_of_single_models_are_left_alone(start: Any, tmp_path: Path) -> None:
    define, making = start()
    assert define(MODELS / "auto" / "__init__.py") == TABLE
    assert making.made == [str(MODELS / "auto" / "__init__.py")]
    assert not (tmp_path / "imports").exists()


@pytest.mark.parametrize("damage", ["", "[1]", '{"a": 1}', "[[[], [1]]]", "\xff"])
def test_a_file_that_is_no_table_is_made_again(start: Any, tmp_path: Path, damage: str) -> None:
    start()[0](MODELS)
    (file,) = (tmp_path / "imports").iterdir()
    file.write_bytes(damage.encode("latin-1"))
    define, making = start()
    assert define(MODELS) == TABLE
    assert making.made == [str(MODELS)]
    assert json.loads(file.read_text())


def test_where_nothing_can_be_kept_it_is_made(start: Any, tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    for directory in (no_home, lambda: tmp_path / "file" / "imports"):
        define, making = start(directory)
        assert define(MODELS) == TABLE
        assert making.made == [str(MODELS)]
