"""Models from directories, single files and a hub: headers only, a few kilobytes of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from shardmlx.errors import UserError
from shardmlx.modelfiles.model_files import open_model
from shardmlx.models.sizes.config_reader import read_config
from shardmlx.planning.facts.workload import model_sizes
from tests.helpers.bare_python import ForkingPython, forking_python
from tests.helpers.fake_models import (
    MISTRAL_LARGE,
    TINY,
    adapters,
    model_files,
    write,
)
from tests.helpers.hub_server import COMMIT, File, Hub, serve, text_file
from tests.helpers.ports import free_port

NAME = "mistralai/Mistral-Large-Instruct-2407"


def error_of(name: str | Path, revision: str | None = None) -> str:
    with pytest.raises(UserError) as caught:
        open_model(str(name), revision)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# Local files


def test_a_directory_gives_every_tensor_its_file_and_bytes(tmp_path: Path) -> None:
    files = open_model(str(write(tmp_path, model_files(TINY, shards=2))))
    assert files.config["hidden_size"] == 64
    assert len(files.tensors) == 4 * 9 + 3
    first = files.tensors["model.embed_tokens.weight"]
    header = files.headers["model-00001-of-00002.safetensors"]
    assert (first.file, first.dtype, first.shape) == (
        "model-00001-of-00002.safetensors",
        "BF16",
        (100, 64),
    )
    assert (first.start, first.end) == (len(header.head), len(header.head) + 12800)


def test_mistrals_own_layout_alone_is_refused_by_all(tmp_path: Path) -> None:
    """``inspect`` and ``plan`` open a model; ``train`` and ``generate`` read its config first."""
    weights = model_files(TINY)["model.safetensors"]
    write(tmp_path, {"params.json": text_file({"dim": 64}), "consolidated.safetensors": weights})
    assert "params.json" in error_of(tmp_path)
    with pytest.raises(UserError, match=r"params\.json"):
        read_config(tmp_path)


def test_a_config_alone_is_a_model_without_tensors_whose_sizes_are_computed(
    tmp_path: Path,
) -> None:
    whole = open_model(str(write(tmp_path / "whole", model_files(TINY))))
    plan = open_model(str(write(tmp_path / "plan", {"config.json": text_file(TINY)})))
    assert plan.tensors == {}
    sizes = model_sizes(whole, None).weight_sizes
    assert model_sizes(plan, None).weight_sizes == sizes
    layer = 2 * (64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 128 + 2 * 64)
    assert sizes.layers == (layer,) * 4
    assert sizes.embedding == 12800
    assert sizes.head == 12800 + 128


def test_a_model_with_adapters_beside_it_is_a_model(tmp_path: Path) -> None:
    """As a run with --adapter-path MODEL leaves it."""
    files = open_model(str(write(tmp_path, model_files(TINY) | adapters(range(2, 4)))))
    assert files.config["hidden_size"] == 64
    assert list(files.headers) == ["model.safetensors"]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda d: d / "nowhere.safetensors", "does not exist: check the path"),
        (
            lambda d: write(d, {"notes.txt": text_file(b"")}),
            "is not a model: it has no config.json",
        ),
        (
            lambda d: write(d, {"config.json": text_file(b"{")}),
            "config.json is not valid JSON: Expecting property name",
        ),
        (
            lambda d: write(d, {"config.json": text_file(TINY)}) / "config.json",
            "config.json is a file: name the directory that holds config.json",
        ),
    ],
)
def test_what_is_no_model_is_named(
    tmp_path: Path, make: Callable[[Path], Path], message: str
) -> None:
    assert message in error_of(make(tmp_path))


def test_a_revision_of_a_directory_is_refused(tmp_path: Path) -> None:
    write(tmp_path, model_files(TINY))
    assert "--revision main of" in error_of(tmp_path, "main")


# The hub. Every call is a process of its own, since huggingface-hub reads its settings once, in a
# Python that has neither MLX nor MPI.


@pytest.fixture(scope="module")
def bare() -> Iterator[ForkingPython]:
    with forking_python() as python:
        yield python


@pytest.fixture
def hub() -> Iterator[Hub]:
    with serve(Hub()) as running:
        yield running


@pytest.fixture
def inspect(hub: Hub, bare: ForkingPython, tmp_path: Path) -> Callable[..., CompletedProcess[str]]:
    def run(*arguments: str, **settings: str) -> CompletedProcess[str]:
        hub.bytes_served = 0
        hub.requests.clear()
        kept = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
        environment = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path / "hf"), **settings}
        return bare.run(arguments, {**kept, "no_proxy": "*", **environment})

    return run


Inspect = Callable[..., CompletedProcess[str]]


def line_of(done: CompletedProcess[str]) -> str:
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("shardmlx: error: ")
    assert done.stderr.count("\n") == 1
    return done.stderr


def test_240_gigabytes_are_inspected_from_half_a_megabyte(hub: Hub, inspect: Inspect) -> None:
    hub.repositories[NAME] = model_files(MISTRAL_LARGE, shards=51)
    done = inspect(NAME, "--pipeline-stages", "4")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    assert lines[0] == f"{NAME} at {COMMIT[:12]}"
    assert any(line.startswith("795 tensors, 122.61 B parameters, 228.38 GiB ") for line in lines)
    assert any(line.startswith("51 files of 228.38 GiB") for line in lines)
    assert [line.split()[2] for line in lines[-4:]] == ["0-21", "22-43", "44-65", "66-87"]
    # Config, index, 51 headers, and the headers of HTTP itself.
    assert hub.bytes_served < 550_000


def test_a_header_longer_than_expected_takes_a_second_request(hub: Hub, inspect: Inspect) -> None:
    files = model_files(MISTRAL_LARGE | {"num_hidden_layers": 40})
    del files["model.safetensors.index.json"]
    hub.repositories["me/big"] = files
    assert "363 tensors" in inspect("me/big").stdout
    assert hub.requests.count("GET /cdn/me/big/model.safetensors") == 2
    assert hub.bytes_served < 60_000


def test_the_token_goes_to_the_hub_and_not_to_where_it_redirects(
    hub: Hub, inspect: Inspect
) -> None:
    hub.repositories["me/tiny"] = model_files(TINY)
    hub.gated.add("me/tiny")
    assert "me/tiny is gated" in line_of(inspect("me/tiny"))
    assert inspect("me/tiny", HF_TOKEN=hub.token).returncode == 0
    assert set(hub.tokens_seen_by_cdn) == {None}


def test_an_unknown_or_private_repository_is_named(hub: Hub, inspect: Inspect) -> None:
    expected = f"no model me/x at {hub.endpoint}"
    assert expected in line_of(inspect("me/x", HF_TOKEN=hub.token))
    hub.repositories["me/x"] = model_files(TINY)
    hub.private.add("me/x")
    assert expected in line_of(inspect("me/x"))


def test_a_name_that_no_repository_can_have_is_not_asked_for(hub: Hub, inspect: Inspect) -> None:
    for name in ("a b/c", "mistral-7b"):
        assert f"no directory {name} here" in line_of(inspect(name))
    assert hub.requests == []


def test_a_revision_is_looked_up(hub: Hub, inspect: Inspect) -> None:
    hub.repositories["me/tiny"] = model_files(TINY)
    hub.revisions.add("v1.0")
    assert inspect("me/tiny", "--revision", "v1.0").returncode == 0
    assert "GET /api/models/me/tiny/revision/v1.0" in hub.requests
    # Everything after the listing is of the commit that it named.
    assert f"GET /me/tiny/resolve/{COMMIT}/model.safetensors" in hub.requests
    assert "me/tiny has no revision 'v2.0': check --revision" in line_of(
        inspect("me/tiny", "--revision", "v2.0")
    )


def test_without_a_network_the_cache_is_used_and_said_to_be(
    hub: Hub, inspect: Inspect, tmp_path: Path
) -> None:
    nowhere = f"http://127.0.0.1:{free_port()}"
    line = line_of(inspect("me/tiny", HF_ENDPOINT=nowhere))
    assert f"there is no directory me/tiny here, and {nowhere} does not answer (" in line
    assert "no internet? give a local directory" in line
    snapshot = tmp_path / "hf" / "hub" / "models--me--tiny" / "snapshots" / COMMIT
    write(snapshot, model_files(TINY))
    write(snapshot.parents[1] / "refs", {"main": text_file(COMMIT.encode())})
    done = inspect("me/tiny", HF_ENDPOINT=nowhere)
    assert f"from the cache: {nowhere} does not answer" in done.stdout
    assert "39 tensors" in done.stdout


def test_offline_the_hub_is_not_asked(hub: Hub, inspect: Inspect, tmp_path: Path) -> None:
    hub.repositories["me/tiny"] = model_files(TINY, shards=2)
    offline = {"HF_HUB_OFFLINE": "1"}
    # Inspection puts config.json and index into the cache, but no weights.
    assert inspect("me/tiny").returncode == 0
    missing = line_of(inspect("me/tiny", **offline))
    assert "model-00001-of-00002.safetensors is missing" in missing
    assert "HF_HUB_OFFLINE is set" in missing
    [snapshot] = (tmp_path / "hf" / "hub" / "models--me--tiny" / "snapshots").iterdir()
    files = hub.repositories["me/tiny"]
    write(snapshot, {name: file for name, file in files.items() if file.is_large})
    done = inspect("me/tiny", **offline)
    assert f"me/tiny at {COMMIT[:12]}" in done.stdout
    assert hub.requests == []


def test_a_server_that_ignores_ranges_is_left_before_it_sends_the_weights(
    hub: Hub, inspect: Inspect
) -> None:
    hub.repositories["me/big"] = model_files(MISTRAL_LARGE)
    hub.ignores_ranges = True
    assert "HF_ENDPOINT" in line_of(inspect("me/big"))
    assert hub.bytes_served < 50_000_000  # what lies in the buffers of the connection


def test_a_connection_that_breaks_is_tried_again_but_not_for_ever(
    hub: Hub, inspect: Inspect
) -> None:
    hub.repositories["me/tiny"] = model_files(TINY)
    hub.drops = 2
    assert inspect("me/tiny").returncode == 0
    hub.truncates = True
    assert f"{hub.endpoint} does not answer (peer closed connection" in line_of(inspect("me/tiny"))
    assert 3 <= hub.requests.count("GET /cdn/me/tiny/model.safetensors") < 20


def test_a_file_on_the_hub_that_is_no_safetensors_file_is_named(hub: Hub, inspect: Inspect) -> None:
    files = model_files(TINY)
    length = (100_000_001).to_bytes(8, "little")
    for content, message in (
        (File(b"", 0, True), "is truncated: 8 bytes"),
        (File(length, 10**12, True), "is not a safetensors file"),
    ):
        hub.repositories["me/bad"] = {"config.json": files["config.json"]} | {
            "model.safetensors": content
        }
        assert f"me/bad/model.safetensors {message}" in line_of(inspect("me/bad"))
        assert hub.bytes_served < 40_000
