"""Tokens are kept on disk for the next run, under the name of all that decided them."""

from __future__ import annotations

import errno
import json
import os
import random
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx_lm.tokenizer_utils
import mlx_lm.tuner.datasets
import pytest

import shardmlx.training.datasets
from shardmlx.config.specs import DataOptions
from shardmlx.config.train import TrainConfig
from shardmlx.errors import UserError
from shardmlx.training import token_cache
from shardmlx.training.datasets import DataSets, read_data
from shardmlx.training.token_cache import DataCache, open_cache, recipe_of
from tests.helpers.letters import CHAT, Letters, listed, write

TRAIN = [{"messages": CHAT, "id": 1}, {"messages": CHAT[:1]}, {"messages": [*CHAT, *CHAT]}]
VALID = [{"messages": CHAT}]


@pytest.fixture
def data(tmp_path: Path) -> str:
    return write(tmp_path / "data", train=TRAIN, valid=VALID)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Of the cache."""
    return tmp_path / "cache"


@pytest.fixture
def warnings() -> list[str]:
    """What the cache says."""
    return []


@pytest.fixture
def cache(directory: Path, warnings: list[str]) -> DataCache:
    return DataCache(directory, "letters", warnings.append)


def never() -> Letters:
    raise AssertionError("all tokens are there")


def read(data: str, cache: DataCache | None, tokenizer: Any = Letters, **options: Any) -> DataSets:
    config = TrainConfig(data=data, **{"batch_size": 1, **options})
    return read_data(DataOptions.of(config), tokenizer, None, cache=cache)


def sets(data: DataSets) -> list[Any]:
    return [listed(each) for each in (data.train, data.valid, data.test)]


def files(directory: Path) -> list[Path]:
    return sorted(directory.iterdir()) if directory.exists() else []


# The same, without the work.


def test_the_second_run_has_the_same_sets_without_a_tokenizer(data: str, cache: DataCache) -> None:
    without = sets(read(data, None))
    assert sets(read(data, cache)) == without
    assert sets(read(data, cache, never)) == without


def test_only_the_set_that_has_changed_is_tokenised(data: str, cache: DataCache) -> None:
    read(data, cache)
    write(Path(data), valid=[*VALID, *VALID])
    shown = []

    def progress(text: str, items: Any) -> Any:
        shown.append(text)
        return iter(items)

    options = DataOptions.of(TrainConfig(data=data, batch_size=1))
    read_data(options, Letters, None, progress, cache)
    assert shown == ["tokenising valid"]


@pytest.mark.parametrize(
    "options",
    [{"max_seq_length": 10}, {"max_seq_length": 10, "mask_prompt": True}, {"batch_size": 2}],
    ids=str,
)
def test_warnings_and_errors_are_the_same(
    data: str, cache: DataCache, options: Mapping[str, Any]
) -> None:
    def outcome(cache: DataCache | None) -> Any:
        try:
            found = read(data, cache, **options)
        except UserError as error:
            return str(error)
        return found.warnings, sets(found)

    without = outcome(None)
    assert [outcome(cache), outcome(cache)] == [without, without]


def test_a_line_that_is_too_long_is_named_all_the_same(data: str, cache: DataCache) -> None:
    read(data, cache)
    with pytest.raises(UserError, match=r"train\.jsonl:3 has 24 tokens, more than"):
        read(data, cache, never, max_seq_length=23, long_sequences="error")


def test_what_was_refused_for_its_length_need_not_be_tokenised_again(
    data: str, cache: DataCache, directory: Path
) -> None:
    with pytest.raises(UserError, match="fewer than --batch-size 4"):
        read(data, cache, batch_size=4)
    assert len(files(directory)) == 1


def test_what_cannot_be_tokenised_is_not_kept(
    tmp_path: Path, cache: DataCache, directory: Path
) -> None:
    data = write(tmp_path / "data", train=[*TRAIN, {"message": CHAT}])
    for _ in range(2):
        with pytest.raises(UserError, match=r"train\.jsonl:4 has no key 'messages'"):
            read(data, cache)
    assert files(directory) == []


def test_rows_that_change_while_they_are_read_are_kept_as_what_they_were(
    data: str, cache: DataCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is read twice: for its digest, and for its rows."""
    before = (Path(data) / "train.jsonl").read_bytes()
    find = DataCache.find

    def find_and_change(self: DataCache, rows: str) -> Any:
        found = find(self, rows)
        write(Path(data), train=VALID)
        return found

    with monkeypatch.context() as context:
        context.setattr(DataCache, "find", find_and_change)
        read(data, cache)
    (Path(data) / "train.jsonl").write_bytes(before)
    assert sets(read(data, cache)) == sets(read(data, None))


def test_sets_of_the_hub_are_not_kept(
    cache: DataCache, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(config: DataOptions, tokenizer: Letters) -> tuple[Any, ...]:
        return shardmlx.training.datasets._create(TRAIN, "train", config, tokenizer), [], []

    monkeypatch.setattr(shardmlx.training.datasets, "load_dataset", load)
    read("someone/something", cache)
    assert files(directory) == []


# What decides the tokens.


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    (path / "templates").mkdir(parents=True)
    (path / "tokenizer.json").write_text("{}")
    (path / "chat_template.jinja").write_text("{{ messages }}")
    (path / "templates" / "other.jinja").write_text("{{ messages }}")
    (path / "model.safetensors").write_text("weights")
    return path


OPTIONS = DataOptions.of(TrainConfig())


@pytest.mark.parametrize(
    "name", ["tokenizer.json", "chat_template.jinja", "templates/other.jinja", "added.json"]
)
def test_another_tokenizer_makes_other_tokens(model: Path, name: str) -> None:
    before = recipe_of(OPTIONS, model)
    (model / name).write_text("other")
    assert recipe_of(OPTIONS, model) not in (before, None)


@pytest.mark.parametrize(
    "options",
    [{"mask_prompt": True}, {"text_feature": "words"}, {"chat_feature": "words"}],
    ids=str,
)
def test_other_options_make_other_tokens(model: Path, options: Mapping[str, Any]) -> None:
    assert recipe_of(replace(OPTIONS, **options), model) != recipe_of(OPTIONS, model)


def test_another_version_makes_other_tokens(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = recipe_of(OPTIONS, model)
    monkeypatch.setattr(token_cache, "_version", lambda package: "99")
    assert recipe_of(OPTIONS, model) != before


def test_other_code_makes_other_tokens(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The code that makes samples is found where it is: else nothing would ever be kept."""
    before, digest = recipe_of(OPTIONS, model), token_cache._digest
    assert before is not None
    for module in (shardmlx.training.datasets, mlx_lm.tuner.datasets, mlx_lm.tokenizer_utils):
        code = Path(str(module.__file__))

        def other(path: Path, code: Path = code) -> str | None:
            return "other code" if path.samefile(code) else digest(path)

        monkeypatch.setattr(token_cache, "_digest", other)
        assert recipe_of(OPTIONS, model) not in (before, None), code


def test_what_decides_no_token_is_left_out(model: Path, tmp_path: Path) -> None:
    before = recipe_of(OPTIONS, model)
    (model / "model.safetensors").write_text("other weights")
    moved = model.rename(tmp_path / "elsewhere")
    options = replace(OPTIONS, max_seq_length=7, batch_size=1, data="elsewhere")
    assert recipe_of(options, moved) == before


def test_code_and_templates_that_may_do_anything_have_no_recipe(model: Path) -> None:
    assert recipe_of(replace(OPTIONS, trust_remote_code=True), model) is None
    (model / "chat_template.jinja").write_text("It is {{ strftime_now('%d %b %Y') }}.")
    assert recipe_of(OPTIONS, model) is None


def test_a_date_is_found_wherever_it_is(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are read piece by piece."""
    for piece in range(1, 40):
        monkeypatch.setattr(token_cache, "_CHUNK", piece)
        (model / "chat_template.jinja").write_text("It is {{ strftime_now('%d %b %Y') }}.")
        assert recipe_of(OPTIONS, model) is None


def test_sets_of_another_recipe_are_others(data: str, directory: Path, cache: DataCache) -> None:
    read(data, cache)
    other = DataCache(directory, "other letters", pytest.fail)
    with pytest.raises(AssertionError, match="all tokens are there"):
        read(data, other, never)


def test_where_they_are_kept(
    model: Path, data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    for option, where in [("auto", "xdg/shardmlx/data"), (f"{tmp_path}/mine", "mine")]:
        options = replace(OPTIONS, data_cache=option)
        read(data, open_cache(options, model, pytest.fail))
        assert len(files(tmp_path / where)) == 2
    assert open_cache(replace(OPTIONS, data_cache="none"), model, pytest.fail) is None


def test_who_has_no_home_is_told_so(
    model: Path, warnings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = replace(OPTIONS, data_cache="~nobody-of-that-name/cache")
    assert open_cache(options, model, warnings.append) is None
    (warning,) = warnings
    assert warning.startswith("--data-cache ~nobody-of-that-name/cache: Could not determine home")


# Nothing that is wrong is trusted.


def entries(data: str, directory: Path, cache: DataCache) -> tuple[Path, list[Any]]:
    """The file of the training set, and what was in it."""
    found = read(data, cache)
    return max(files(directory), key=lambda path: path.stat().st_size), sets(found)


def test_a_damaged_file_is_made_anew(data: str, directory: Path, cache: DataCache) -> None:
    path, expected = entries(data, directory, cache)
    sound = path.read_bytes()
    draw = random.Random(7)
    damages = [b"", sound[:-1], sound[: len(sound) // 2], sound + b"\0", b"{}", os.urandom(999)]
    for _ in range(300):
        spoiled = bytearray(sound)
        spoiled[draw.randrange(len(spoiled))] ^= 1 << draw.randrange(8)
        damages.append(bytes(spoiled))
    for damage in damages:
        path.write_bytes(damage)
        assert sets(read(data, cache)) == expected
        assert path.read_bytes() == sound


def test_a_file_under_the_name_of_another_is_made_anew(
    data: str, directory: Path, cache: DataCache
) -> None:
    _, expected = entries(data, directory, cache)
    one, other = files(directory)
    one.write_bytes(other.read_bytes())
    assert sets(read(data, cache)) == expected


# What goes wrong on the disk.


def test_a_place_that_cannot_be_written_is_said_once(
    data: str, directory: Path, cache: DataCache, warnings: list[str]
) -> None:
    directory.write_text("a file")
    assert sets(read(data, cache)) == sets(read(data, None))
    assert warnings == [
        f"--data-cache: {directory} does not keep the tokens for the next run: File exists: name "
        "another directory, or none"
    ]


def test_a_full_disk_is_said_once_and_left_clean(
    data: str,
    directory: Path,
    cache: DataCache,
    warnings: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(partial: Path, path: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(token_cache, "replace_durably", full)
    assert sets(read(data, cache)) == sets(read(data, None))
    assert len(warnings) == 1
    assert "No space left on device" in warnings[0]
    assert files(directory) == []


# It does not grow for ever.


def aged(path: Path, seconds: float) -> Path:
    path.write_bytes(bytes(1000))
    used = time.time() - seconds
    os.utime(path, (used, used))
    return path


def named(directory: Path, number: int) -> Path:
    directory.mkdir(exist_ok=True)
    return directory / f"tokens-{number:064x}.safetensors"


def test_what_was_not_used_for_long_is_removed(
    data: str, directory: Path, cache: DataCache
) -> None:
    day = 24 * 3600.0
    kept = aged(named(directory, 1), 29 * day)
    removed = [aged(named(directory, 2), 31 * day), aged(directory / "partial-tokens-x", 2 * day)]
    others = [aged(directory / "thesis.safetensors", 99 * day), aged(directory / "notes", 99 * day)]
    read(data, cache)
    assert all(path.exists() for path in [kept, *others])
    assert not any(path.exists() for path in removed)


def test_what_was_not_used_for_longest_makes_room(
    data: str, directory: Path, cache: DataCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = [aged(named(directory, number), 100.0 * number) for number in range(10)]
    monkeypatch.setattr(token_cache, "MAX_BYTES", 5500)
    read(data, cache)
    left = [path.exists() for path in old]
    assert left == sorted(left, reverse=True)
    assert 0 < sum(left) < len(left)
    assert sum(path.stat().st_size for path in files(directory)) <= 5500
    read(data, cache, never)


def test_a_set_that_is_used_is_not_the_next_to_go(
    data: str, directory: Path, cache: DataCache
) -> None:
    read(data, cache)
    for path in files(directory):
        os.utime(path, (0, 0))
    read(data, cache, never)
    assert all(time.time() - path.stat().st_mtime < 60 for path in files(directory))


def test_a_set_that_is_too_large_is_not_kept(
    data: str, directory: Path, cache: DataCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_cache, "MAX_BYTES", 10)
    read(data, cache)
    assert files(directory) == []


def test_the_files_hold_no_pickle(data: str, directory: Path, cache: DataCache) -> None:
    """A header of safetensors in each."""
    read(data, cache)
    for path in files(directory):
        content = path.read_bytes()
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        kinds = {name: tensor["dtype"] for name, tensor in header.items()}
        assert kinds == {"tokens": "I32", "bounds": "I64", "order": "I64", "digest": "U8"}
