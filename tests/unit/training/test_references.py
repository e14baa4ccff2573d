"""Preferences are learnt, against the model as the run starts: also by a run that goes on."""

from __future__ import annotations

import math
import shutil
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from safetensors.numpy import load_file

from shardmlx.config.train import TrainConfig
from shardmlx.distributed.crew import Crew
from shardmlx.errors import UserError
from shardmlx.training.command import train_model
from shardmlx.training.evaluation import Evaluation
from shardmlx.training.references import FILE
from shardmlx.training.rows import share_of
from shardmlx.training.run_worker import RunWorker
from shardmlx.training.worker import TrainWorker
from tests.helpers.loaded_runs import with_loaded_runs
from tests.helpers.local_transport import LocalNetwork, LocalTransport, alone
from tests.helpers.models_and_batches import load_arrays
from tests.helpers.preference_data import preference_directory

pytestmark = pytest.mark.usefixtures("limited_to_a_test")

ONE: dict[str, Any] = {"pack": False}
TWO: dict[str, Any] = {"pack": True, "schedule": "1f1b"}

Told = dict[str, list[Mapping[str, Any]]]
Train = Callable[..., Told]


@pytest.fixture(scope="module")
def data(pirate: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return preference_directory(tmp_path_factory.mktemp("preferences"), pirate)


@pytest.fixture
def train(small: Path, data: Path, tmp_path: Path) -> Train:
    def train(ranks: int, name: str, **options: Any) -> Told:
        """Return what a run says of training and validation."""
        told: defaultdict[str, list[Mapping[str, Any]]] = defaultdict(list)
        given: dict[str, Any] = {"objective": "dpo", "batch_size": 4, "micro_batch_size": 2}
        given |= {"iters": 4, "num_layers": -1, "learning_rate": 2e-4, "max_seq_length": 128}
        given |= {"lora_parameters": {"rank": 4, "scale": 10.0, "dropout": 0.0}}
        given |= {"steps_per_report": 1, "steps_per_eval": 4, "val_batches": 2}
        given |= {"model": str(small), "adapter_path": str(tmp_path / name), **options}
        kind = "singles" if given["objective"] == "kto" else "pairs"
        config = TrainConfig.from_flat(**{"data": str(data / kind), **given})

        def listen(event: str, values: Mapping[str, Any]) -> None:
            told[event].append(values)

        network = LocalNetwork(ranks, timeout=60)
        network.run(lambda rank: train_model(config, rank, on_event=listen))
        return dict(told)

    return train


def losses(told: Told, event: str = "train") -> list[float]:
    return [each["loss"] for each in told[event]]


def test_orpo_brings_held_out_pairs_into_the_right_order(train: Train) -> None:
    how = {"objective": "orpo", "beta": 5.0, "learning_rate": 1e-2}
    told = train(1, "orpo", batch_size=8, iters=10, steps_per_eval=10, val_batches=-1, **how)
    first, last = (each["accuracy"] for each in told["val"])
    assert last >= first + 0.25


def test_kto_makes_the_answers_likelier_that_are_wanted_and_the_others_less(train: Train) -> None:
    how = {"objective": "kto", "beta": 0.3, "learning_rate": 3e-2}
    first, last = train(1, "kto", batch_size=8, val_batches=-1, **how)["val"]
    assert first["chosen_reward"] == pytest.approx(0, abs=1e-4)
    assert first["rejected_reward"] == pytest.approx(0, abs=1e-4)
    assert last["chosen_reward"] > 0.1
    assert last["rejected_reward"] < -0.1


@pytest.mark.parametrize(
    "options",
    [{"fine_tune_type": "full"}, {"fine_tune_type": "dora"}, {"objective": "orpo"}],
    ids=str,
)
def test_full_fine_tunes_dora_and_an_objective_without_reference(
    options: dict[str, Any], train: Train
) -> None:
    one, two = train(1, "one", **ONE, **options), train(2, "two", **TWO, **options)
    np.testing.assert_allclose(losses(two), losses(one), rtol=1e-5)
    np.testing.assert_allclose(losses(two, "val"), losses(one, "val"), rtol=1e-5)


@pytest.mark.parametrize("objective", ["dpo", "kto", "simpo"])
def test_prompts_of_pairs_are_read_once_where_nothing_is_learnt(
    objective: str, small: Path, data: Path, tmp_path: Path
) -> None:
    kind = "singles" if objective == "kto" else "pairs"
    given: dict[str, Any] = {"objective": objective, "batch_size": 4, "num_layers": -1, **ONE}
    given |= {"model": str(small), "data": str(data / kind), "max_seq_length": 128}

    def lengths(rank: LocalTransport) -> tuple[int, int] | None:
        return with_loaded_runs(
            TrainConfig.from_flat(**given, adapter_path=str(tmp_path)), rank, counted
        )

    def counted(crew: Crew[TrainWorker]) -> tuple[int, int]:
        run = crew.worker.runs[0]
        evaluation = Evaluation(crew.part(RunWorker, "runs", 0), np.random.RandomState(0))
        batch = next(evaluation.batches("train", loop=False))
        ((rows,),) = next(evaluation.groups([batch]))
        plan, shares_prompts = run.run.training.plan, run.run.shares_prompts
        share = share_of(plan, 0, rows, shares_prompts=shares_prompts)
        computed = sum(math.prod(part.shape) for part in share.microbatches)
        return computed, int(batch.spans[:, 1].sum() - batch.spans[1::2, 0].sum() + 2)

    counts = alone(lengths)
    assert counts is not None
    computed, once = counts
    assert (computed == once) == (objective != "kto")


def test_a_resumed_run_goes_on_to_the_bit_with_the_references_of_its_start(
    train: Train, tmp_path: Path
) -> None:
    """With KTO, which needs those of others' answers too."""
    kept: dict[str, Any] = {"objective": "kto", "checkpoint_every": 2, "save_every": 4}
    place = {"checkpoint_dir": str(tmp_path / "checkpoints")}
    train(2, "half", **TWO, **kept | place | {"iters": 2})
    rest = train(2, "rest", **TWO, **kept | place)
    whole = train(2, "whole", **TWO, **kept | {"iters": 5})
    assert losses(rest) == losses(whole)[2:4]
    ours, theirs = (
        load_arrays(tmp_path / name / "0000004_adapters.safetensors") for name in ("rest", "whole")
    )
    assert ours.keys() == theirs.keys()
    assert all(mx.array_equal(ours[name], theirs[name]).item() for name in theirs)
    # In another layout, and with the numbers lost: from the model, before its checkpoint is read.
    (tmp_path / "checkpoints" / FILE).write_bytes(b"damaged")
    longer = train(1, "longer", **ONE, **kept | place | {"iters": 5})
    np.testing.assert_allclose(losses(longer), losses(whole)[4:], rtol=1e-5)
    np.testing.assert_allclose(losses(longer, "val"), losses(whole, "val")[-1:], rtol=1e-5)


def test_references_are_of_the_very_weights_that_the_run_starts_from(
    train: Train, tmp_path: Path
) -> None:
    """Trained anew under the same name, they are others."""
    start = tmp_path / "sft" / "adapters.safetensors"
    sft = {"objective": "orpo", "learning_rate": 3e-2, "val_batches": 0, "iters": 1}
    train(1, "sft", **sft)
    kept: dict[str, Any] = {"checkpoint_dir": str(tmp_path / "checkpoints"), "iters": 1}
    kept |= {"resume_adapter_file": str(start), "steps_per_eval": 1}
    first = train(1, "dpo", **kept)
    assert losses(first) == pytest.approx([math.log(2)], abs=1e-5)
    before = (tmp_path / "checkpoints" / FILE).read_bytes()
    train(1, "sft", **sft | {"seed": 1})
    with pytest.raises(UserError) as refused:
        train(1, "dpo", **kept | {"iters": 2})
    assert str(start) in refused.value.problem
    # As if the run had ended before its first checkpoint.
    for place in (tmp_path / "checkpoints").glob("step-*"):
        shutil.rmtree(place)
    again = train(1, "dpo", **kept)
    assert losses(again) == pytest.approx([math.log(2)], abs=1e-5)
    assert losses(again, "val") == pytest.approx([math.log(2)], abs=1e-5)
    assert (tmp_path / "checkpoints" / FILE).read_bytes() != before


def test_references_are_of_the_very_test_set(train: Train, data: Path, tmp_path: Path) -> None:
    """It is no part of what makes a run: a run that goes on may have another, of any length."""
    place = shutil.copytree(data / "pairs", tmp_path / "data" / "pairs")
    file = place / "test.jsonl"
    rows = (data / "pairs" / "valid.jsonl").read_text().splitlines()[:12]
    file.write_text("\n".join(rows))
    kept: dict[str, Any] = {"checkpoint_dir": str(tmp_path / "checkpoints"), "iters": 1}
    kept |= {"train": True, "test": True, "test_batches": -1, "data": str(place)}
    (before,) = losses(train(1, "first", **kept), "test")
    found = []
    for others in (rows[::-1], rows[:8]):
        file.write_text("\n".join(others))
        (loss,) = losses(train(1, "again", **kept), "test")
        (expected,) = losses(train(1, "anew", **kept | {"checkpoint_dir": None}), "test")
        assert loss == pytest.approx(expected, rel=1e-5)
        found.append(loss)
    assert found[0] == pytest.approx(before, rel=1e-5), "the same rows in another order"
    # The file keeps what is now, of all sets.
    assert load_file(tmp_path / "checkpoints" / FILE)["test"].shape[0] == 2 * 8
