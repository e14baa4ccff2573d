"""A rank without the model is given the tensors of its stages, and takes nothing else for them."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from shardmlx.common.durable_files import LOCK
from shardmlx.common.reporter import Reporter
from shardmlx.config.specs import ModelSource
from shardmlx.distributed import byte_stream
from shardmlx.distributed.agreement import AgreedError
from shardmlx.distributed.byte_stream import Outgoing
from shardmlx.distributed.crew import Crew, lead
from shardmlx.distributed.shared_disks import Disks
from shardmlx.errors import UserError
from shardmlx.loading import partial_copy
from shardmlx.loading.build import build_to_generate
from shardmlx.loading.local_files import CopyPlan, FoundFiles, LocalFiles, Wanted
from shardmlx.loading.manifest import read_model_manifest
from shardmlx.loading.rank_setup import ModelWorker, bring_weights, open_everywhere
from shardmlx.loading.transfer import Needs
from shardmlx.main import main
from shardmlx.modelfiles import safetensors_header
from shardmlx.modelfiles.parts import read_shape
from shardmlx.modelfiles.sources import RECORD
from shardmlx.models.runtime.divided_layers import take_share
from shardmlx.models.runtime.slice import Slice
from shardmlx.models.sizes.config_reader import read_config
from shardmlx.models.sizes.shares import WHOLE, TensorShares
from testbed.tiny_models import save_model_directory, tiny_config
from tests.helpers.local_transport import LocalNetwork, LocalTransport
from tests.helpers.models_and_batches import load_arrays
from tests.helpers.saved_adapters import save_random_lora

LAYERS = 4
QUIET = Reporter(quiet=True)

FAMILIES = {
    "llama": tiny_config("llama", layers=LAYERS),
    "tied": tiny_config("qwen2", layers=LAYERS, tied=True),
    "qwen3": tiny_config("qwen3", layers=LAYERS, tied=True),
    "ministral3": tiny_config("ministral3", layers=LAYERS),
    "mixtral": tiny_config("mixtral", layers=LAYERS),
    "quantised": tiny_config(layers=LAYERS, tied=True, quantization={"group_size": 32, "bits": 4}),
    "wide": tiny_config(layers=LAYERS, head_dim=32, quantization={"group_size": 32, "bits": 4}),
}


@pytest.fixture(scope="module", params=FAMILIES, ids=str)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("models") / request.param
    return save_model_directory(path, FAMILIES[request.param])


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model_directory(tmp_path_factory.mktemp("models") / "llama", FAMILIES["llama"])


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary files go; with pieces smaller than tensors."""
    directory = tmp_path / "temporary"
    directory.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(directory))
    monkeypatch.setattr(byte_stream, "PIECE_BYTES", 1000)
    monkeypatch.setattr(safetensors_header, "_PIECE", 300)
    return directory


def source(model: Path, weights: str, cache: Path | None = None) -> ModelSource:
    where = None if cache is None else str(cache)
    return ModelSource(model=str(model), revision=None, weights=weights, weight_cache=where)


class Elsewhere(LocalFiles):
    """The files of a rank that looks for them, and keeps copies, in directories of its own."""

    def __init__(self, transport: LocalTransport, place: Path, cache: Path | None) -> None:
        super().__init__(transport, QUIET)
        self._place = place
        self._cache = None if cache is None else str(cache)

    def look(self, wanted: Wanted | None) -> FoundFiles:
        return super().look(wanted and replace(wanted, name=str(self._place)))

    def see_disks(self, cache: str | None) -> Disks:
        return super().see_disks(cache and self._cache)

    def make_copy(self, plan: CopyPlan) -> str | None:
        return super().make_copy(replace(plan, cache=plan.cache and self._cache))


class Loader(ModelWorker):
    """A rank that loads one slice of a model."""

    def __init__(
        self,
        model_files: Elsewhere,
        adapter_files: Elsewhere,
        transport: LocalTransport,
        layers: tuple[int, int],
        shares: TensorShares,
    ) -> None:
        super().__init__(transport, QUIET)
        self.model_files = model_files
        self.adapter_files = adapter_files
        self._layers = layers
        self._shares = shares
        self.part: Slice | None = None

    def build(self) -> tuple[int, int]:
        opened = self.opened
        rank = self.transport.rank
        self.part = build_part(opened.path, self._layers, opened.adapters, self._shares, rank)
        return self._layers

    def load(self) -> None:
        assert self.part is not None, "it was built"
        self.part.load()


def load(
    transport: LocalTransport,
    model: Path,
    layers: tuple[int, int],
    mode: str = "rank0",
    cache: Path | None = None,
    adapters: str | None = None,
    shares: TensorShares = WHOLE,
) -> Slice:
    """Return the slice of a rank, which may look for the model, and keep it, in its own places."""

    def load_all(crew: Crew[Loader]) -> None:
        opened = open_everywhere(crew, source(model, mode, cache), adapters, Reporter())
        stages = [[own] for own in crew.all(Loader.build)]
        bring_weights(crew, Needs(stages, opened.shape, shares), QUIET)
        crew.all(Loader.load)

    model_files = Elsewhere(transport, model, cache)
    adapter_files = Elsewhere(transport, Path(adapters or ""), cache)
    worker = Loader(model_files, adapter_files, transport, layers, shares)
    with closing(worker):
        lead(transport, worker, load_all)
    assert worker.part is not None
    return worker.part


def shares_of(model: Path, weights: tuple[int, ...]) -> TensorShares:
    """Return shares of a model, or the whole of that whose heads share scales."""
    is_whole = model.name == "quantised"
    return WHOLE if is_whole else TensorShares(weights, 32 if model.name == "wide" else 1)


def build_part(
    model: Path, layers: tuple[int, int], adapters: str | None, shares: TensorShares, rank: int
) -> Slice:
    part = Slice(build_to_generate(model, dtype=None, adapter_path=adapters, seed=0), *layers)
    if shares.size > 1:
        shape = read_shape(read_config(model))
        take_share(part, shape, shares, rank % shares.size, lambda x: x)
    return part


def run(work: Callable[[LocalTransport], Any], size: int) -> list[Any]:
    return LocalNetwork(size, timeout=20).run(work)


def equal(part: Slice, expected: Slice) -> bool:
    return all(mx.array_equal(part[n], a).item() for n, a in expected.parameters().items())


def expected_part(
    model: Path,
    layers: tuple[int, int],
    adapters: str | None = None,
    shares: TensorShares = WHOLE,
    rank: int = 0,
) -> Slice:
    part = build_part(model, layers, adapters, shares, rank)
    part.load()
    return part


@pytest.mark.parametrize(
    ("ranges", "weights"),
    [
        ([(0, 4), (0, 4)], (1,)),
        ([(0, 1), (1, 3), (3, 4)], (1,)),
        ([(0, 2), (0, 2), (2, 4), (2, 4)], (2, 1)),
    ],
    ids=str,
)
def test_every_stage_is_that_of_the_model(
    model: Path, ranges: Sequence[tuple[int, int]], weights: tuple[int, ...], temporary: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Where nothing was brought there are no zeros that might pass for weights, but 0xff."""
    shares = shares_of(model, weights)
    sparse = partial_copy._open_sparse

    def spoiled(path: Path, header: safetensors_header.Header) -> int:
        descriptor, begin = sparse(path, header), len(header.head)
        os.pwrite(descriptor, b"\xff" * (header.file_size - begin), begin)
        return descriptor

    monkeypatch.setattr(partial_copy, "_open_sparse", spoiled)

    def work(transport: LocalTransport) -> bool:
        layers, rank = ranges[transport.rank], transport.rank
        part = load(transport, model, layers, shares=shares)
        return equal(part, expected_part(model, layers, shares=shares, rank=rank))

    assert run(work, len(ranges)) == [True] * len(ranges)
    assert list(temporary.iterdir()) == []


class Traffic:
    """Bytes of the tensors that are sent: from whom, to whom."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sent: dict[tuple[int, int], int] = {}
        write = Outgoing.write

        def counted(outgoing: Outgoing, data: bytes | memoryview) -> None:
            pair = (outgoing._outbox.transport.rank, outgoing._peer)
            self.sent[pair] = self.sent.get(pair, 0) + len(data)
            write(outgoing, data)

        monkeypatch.setattr(Outgoing, "write", counted)


@pytest.fixture
def traffic(monkeypatch: pytest.MonkeyPatch) -> Traffic:
    return Traffic(monkeypatch)


def test_ranks_that_share_layers_receive_their_own_part(model: Path, traffic: Traffic) -> None:
    """Half of all matrices of layers and experts, rows and columns."""
    received = []
    for shares in (shares_of(model, (1, 1)), WHOLE):
        traffic.sent.clear()
        run(partial(load, model=model, layers=(0, LAYERS), shares=shares), 2)
        received.append(traffic.sent[0, 1])
    arrays = load_arrays(*model.glob("*.safetensors"))
    divided = sum(array.nbytes for name, array in arrays.items() if "_proj." in name)
    is_whole = model.name == "quantised"
    assert received[1] - received[0] == (0 if is_whole else divided // 2)


def test_replicas_pass_on_what_they_receive(llama: Path, traffic: Traffic, tmp_path: Path) -> None:
    ranges = [(0, 2), (2, 4), (0, 2), (2, 4), (2, 4)]

    def work(transport: LocalTransport) -> bool:
        cache = tmp_path / str(transport.rank)  # disks of their own
        part = load(transport, llama, ranges[transport.rank], cache=cache)
        return equal(part, expected_part(llama, ranges[transport.rank]))

    assert run(work, 5) == [True] * 5
    first, second = (expected_part(llama, each).nbytes for each in ((0, 2), (2, 4)))
    assert traffic.sent == {(0, 2): first, (0, 1): second, (1, 3): second, (3, 4): second}


def test_ranks_that_see_the_same_disk_are_sent_one_copy(
    llama: Path, traffic: Traffic, tmp_path: Path
) -> None:
    run(lambda t: load(t, llama, (2, 4), cache=tmp_path / "cache"), 4)
    assert traffic.sent == {(0, 1): expected_part(llama, (2, 4)).nbytes}


def test_who_has_the_same_model_reads_it_and_sends_it(
    llama: Path, traffic: Traffic, tmp_path: Path
) -> None:
    """Ranks 0 and 1 have it, in other directories: 2 and 3, who need different parts, are each
    sent theirs by another."""
    copy = tmp_path / "copy"
    shutil.copytree(llama, copy)
    places = [llama, copy, tmp_path / "none", tmp_path / "none"]
    ranges = [(0, 4), (0, 4), (1, 2), (2, 3)]

    def work(transport: LocalTransport) -> None:
        rank = transport.rank
        part = load(transport, places[rank], ranges[rank], "auto", tmp_path / str(rank))
        assert equal(part, expected_part(llama, ranges[rank]))

    run(work, 4)
    one = expected_part(llama, (1, 2)).nbytes
    assert sum(n for (source, _), n in traffic.sent.items() if source == 0) == one
    assert sum(n for (source, _), n in traffic.sent.items() if source == 1) == one
    assert {peer for _, peer in traffic.sent} == {2, 3}


def test_another_model_in_the_same_place_is_not_taken_for_it(
    llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = save_model_directory(tmp_path / "other", FAMILIES["llama"], seed=2)

    def work(transport: LocalTransport, mode: str) -> bool:
        part = load(transport, other if transport.rank else llama, (1, 3), mode)
        return equal(part, expected_part(llama, (1, 3)))

    assert run(lambda transport: work(transport, "auto"), 2) == [True, True]
    assert f"what is in {other} differs from rank 0's" in capsys.readouterr().out
    with pytest.raises(AgreedError, match=f"rank 1 .* {other} .*--weights auto"):
        run(lambda transport: work(transport, "local"), 2)


# A copy that is kept.


def test_what_was_kept_is_not_sent_again_and_what_is_missing_is_added(
    llama: Path, traffic: Traffic, tmp_path: Path
) -> None:
    def once(layers: tuple[int, int]) -> int:
        traffic.sent.clear()
        parts = run(lambda t: load(t, llama, layers, cache=tmp_path / str(t.rank)), 2)
        assert equal(parts[1], expected_part(llama, layers))
        return sum(traffic.sent.values())

    whole = expected_part(llama, (0, 4)).nbytes
    assert once((2, 4)) == expected_part(llama, (2, 4)).nbytes
    assert once((2, 4)) == 0
    assert once((3, 4)) == 0
    assert once((0, 4)) == whole - expected_part(llama, (2, 4)).nbytes
    assert once((0, 4)) == 0
    assert not (tmp_path / "0").exists()  # rank 0 has the model


@pytest.fixture
def kept(llama: Path, tmp_path: Path) -> Path:
    """A copy of layers 1 and 2."""
    run(lambda t: load(t, llama, (1, 3), cache=tmp_path / "cache"), 2)
    (entry,) = (tmp_path / "cache").iterdir()
    return entry


def again(llama: Path, tmp_path: Path) -> Slice:
    part: Slice = run(lambda t: load(t, llama, (1, 3), cache=tmp_path / "cache"), 2)[1]
    return part


def test_a_tensor_that_was_damaged_since_is_sent_again(
    llama: Path, kept: Path, traffic: Traffic, tmp_path: Path
) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    where = read_model_manifest(llama, ["model.safetensors"], "").tensors()[name]
    with (kept / where.file).open("rb+") as file:
        file.seek(where.start + 40)
        file.write(b"\x00\x01")
    assert equal(again(llama, tmp_path), expected_part(llama, (1, 3)))
    assert traffic.sent == {(0, 1): where.nbytes}


@pytest.mark.parametrize(
    "torn", [b'\n{"name": "model.layers.1.ml', b"\n[1]", b"\n\xff", b'\n{"name": 1, "digest": 2}']
)
def test_a_record_that_breaks_off_loses_only_what_it_does_not_say(
    llama: Path, kept: Path, traffic: Traffic, tmp_path: Path, torn: bytes
) -> None:
    lines = (kept / RECORD).read_bytes().split(b"\n")
    lost = json.loads(lines[-1])["name"]
    (kept / RECORD).write_bytes(b"\n".join(lines[:-1]) + torn)
    assert equal(again(llama, tmp_path), expected_part(llama, (1, 3)))
    assert sum(traffic.sent.values()) == expected_part(llama, (1, 3))[lost].nbytes
    traffic.sent.clear()
    again(llama, tmp_path)
    assert traffic.sent == {}


def test_an_interrupted_copy_goes_on(
    llama: Path, traffic: Traffic, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is complete is on record after every so many bytes."""
    monkeypatch.setattr(partial_copy, "_FLUSH_EVERY", 20_000)
    write, written = partial_copy.PartialCopy.write, 0

    def failing(copy: Any, file: str, offset: int, data: memoryview) -> None:
        nonlocal written
        written += len(data)
        if written > 40_000:
            raise OSError("the cable was pulled")
        write(copy, file, offset, data)

    with monkeypatch.context() as context:
        context.setattr(partial_copy.PartialCopy, "write", failing)
        with pytest.raises((OSError, RuntimeError)):
            run(lambda t: load(t, llama, (0, 4), cache=tmp_path / "cache"), 2)
    traffic.sent.clear()
    part = run(lambda t: load(t, llama, (0, 4), cache=tmp_path / "cache"), 2)[1]
    assert equal(part, expected_part(llama, (0, 4)))
    left = expected_part(llama, (0, 4)).nbytes - sum(traffic.sent.values())
    assert 20_000 <= left <= 40_000


def test_other_weights_have_another_copy(llama: Path, tmp_path: Path) -> None:
    """Also where they differ in the middle of one tensor, which nobody reads to find out."""
    model = tmp_path / "model"
    shutil.copytree(llama, model)
    run(lambda t: load(t, model, (1, 3), cache=tmp_path / "cache"), 2)
    file = model / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-20_000] ^= 1
    file.write_bytes(data)
    os.utime(file, ns=(1, 1))
    part = run(lambda t: load(t, model, (1, 3), cache=tmp_path / "cache"), 2)[1]
    assert equal(part, expected_part(model, (1, 3)))
    assert len(list((tmp_path / "cache").iterdir())) == 2


# What is refused.


def test_a_disk_that_is_full_is_refused_on_all_ranks(
    llama: Path, monkeypatch: pytest.MonkeyPatch, temporary: Path
) -> None:
    usage = shutil.disk_usage(temporary)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=12_000))
    with pytest.raises(
        AgreedError, match=r"^rank 1 on localhost: .*iB are to be written, and .*iB are free"
    ):
        run(lambda t: load(t, llama, (0, 4)), 2)
    assert list(temporary.iterdir()) == []


def test_a_cache_that_another_run_fills_is_refused(llama: Path, kept: Path, tmp_path: Path) -> None:
    with (kept / LOCK).open("rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(UserError, match=f"another run is filling {kept}: wait for its end"):
            again(llama, tmp_path)


def test_a_cache_that_cannot_be_written_is_refused(llama: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"^rank 1 on localhost .*--weight-cache"):
        run(lambda t: load(t, llama, (1, 3), cache=tmp_path / "file"), 2)


def test_nothing_temporary_is_left_when_loading_fails(llama: Path, temporary: Path) -> None:
    def work(transport: LocalTransport) -> None:
        def fail(crew: Crew[ModelWorker]) -> None:
            open_everywhere(crew, source(llama, "rank0"), None, QUIET)
            raise UserError("the data is bad")

        with closing(ModelWorker(transport, QUIET)) as worker:
            lead(transport, worker, fail)

    with pytest.raises(UserError, match="the data is bad"):
        run(work, 2)
    assert list(temporary.iterdir()) == []


# Adapters.


@pytest.mark.parametrize("peft", [False, True])
def test_adapters_that_only_rank_0_has(
    peft: bool, llama: Path, tmp_path: Path, temporary: Path
) -> None:
    made = save_random_lora(tmp_path / ("made" if peft else "adapters"), llama, 3)
    if peft:
        words = ["--adapter-path", str(made), "--peft", "-o", str(tmp_path / "adapters")]
        assert main(["export", str(llama), *words]) == 0

    def work(transport: LocalTransport) -> bool:
        own = str(tmp_path / "adapters") if transport.rank == 0 else str(tmp_path / "none")
        part = load(transport, llama, (1, 3), mode="auto", adapters=own)
        assert any("lora_b" in name for name in part.parameters())
        return equal(part, expected_part(llama, (1, 3), str(tmp_path / "adapters")))

    assert run(work, 3) == [True] * 3
    assert list(temporary.iterdir()) == []
