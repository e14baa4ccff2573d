"""Preferences: the losses of the papers, and through stages the gradients of one process."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from shardmlx.config.objective import OBJECTIVES, ObjectiveOptions
from shardmlx.config.specs import NO_SAVINGS, Savings
from shardmlx.engine.batches import (
    BASELINE,
    KNOWN,
    REFERENCE,
    Batch,
    Samples,
    make_batch,
    pack,
    split,
)
from shardmlx.engine.loss import Head
from shardmlx.engine.objectives import LOSSES, AnswerScores, Objective
from shardmlx.errors import UserError
from shardmlx.models.runtime.slice import Slice
from testbed.tiny_models import VOCABULARY
from tests.helpers.engines import run_engine
from tests.helpers.local_transport import LocalNetwork
from tests.helpers.models_and_batches import Gradients, Layout, largest_difference, tiny_model
from tests.helpers.preference_data import write_own_objective

CASES: dict[str, dict[str, Any]] = {
    "dpo": {},
    "dpo, smoothed": {"label_smoothing": 0.2, "beta": 0.3},
    "dpo, hinge": {"loss_type": "hinge"},
    "dpo, ipo": {"loss_type": "ipo"},
    "dpo, robust": {"loss_type": "robust", "label_smoothing": 0.1},
    "orpo": {"beta": 0.25},
    "simpo": {"simpo_gamma": 1.4, "label_smoothing": 0.1},
    "cpo": {"label_smoothing": 0.1},
    "cpo, preferences alone": {"cpo_alpha": 0.0},
    "kto": {"desirable_weight": 1.3, "undesirable_weight": 0.7},
}


def objective_of(case: str) -> Objective:
    how = ObjectiveOptions(objective=case.split(",")[0], **CASES[case])
    how.check_objective()
    return Objective(how)


# The formulas of the papers, in NumPy's float64.


def sigmoid(x: np.ndarray) -> np.ndarray:
    return np.asarray(1 / (1 + np.exp(-x)))


def smoothed(x: np.ndarray, share: float) -> Any:
    return -(1 - share) * np.log(sigmoid(x)) - share * np.log(sigmoid(-x))


def formula(
    how: ObjectiveOptions, logps: Any, refs: Any, tokens: Any, wanted: Any, kl: float
) -> Any:
    """The loss of each pair (chosen and rejected alternate), or of each row."""
    beta, share = how.strength, how.label_smoothing
    (w, l), (rw, rl), (nw, nl) = ((v[0::2], v[1::2]) for v in (logps, refs, tokens))
    match how.objective, how.loss_type:
        case "dpo", "sigmoid":
            return smoothed(beta * ((w - rw) - (l - rl)), share)
        case "dpo", "hinge":
            return np.maximum(0, 1 - beta * ((w - rw) - (l - rl)))
        case "dpo", "ipo":
            return (((w - rw) / nw - (l - rl) / nl) - 1 / (2 * beta)) ** 2
        case "dpo", "robust":
            h = beta * ((w - rw) - (l - rl))
            own, other = -np.log(sigmoid(h)), -np.log(sigmoid(-h))
            return ((1 - share) * own - share * other) / (1 - 2 * share)
        case "orpo", _:
            pw, pl = np.exp(w / nw), np.exp(l / nl)
            odds = np.log((pw / (1 - pw)) / (pl / (1 - pl)))
            return -w / nw - beta * np.log(sigmoid(odds))
        case "simpo", _:
            return smoothed(beta * w / nw - beta * l / nl - how.simpo_gamma, share)
        case "cpo", _:
            return smoothed(beta * (w - l), share) - how.cpo_alpha * w / nw
        case "kto", _:
            gain = beta * (logps - refs - kl)
            good, bad = 1 - sigmoid(gain), 1 - sigmoid(-gain)
            return np.where(wanted, how.desirable_weight * good, how.undesirable_weight * bad)
    raise AssertionError(how)


LOGPS = np.array([-12.5, -30.25, -8.0, -7.5, -41.0, -3.125])
REFERENCES = np.array([-13.0, -29.5, -9.5, -7.0, -40.0, -4.0])
TOKENS = np.array([9.0, 17.0, 4.0, 5.0, 30.0, 2.0])
WANTED = np.array([True, False] * 3)
KL = 0.375


@pytest.mark.parametrize("case", CASES)
def test_the_losses_are_those_of_the_papers(case: str) -> None:
    objective = objective_of(case)
    loss, _ = LOSSES[objective.how.objective]
    logps, references, tokens = (
        mx.array(each.astype(np.float32)) for each in (LOGPS, REFERENCES, TOKENS)
    )
    answers = AnswerScores(logps, references, tokens, mx.array(WANTED), mx.full((6,), KL))
    found = np.array(loss(answers, objective.how))
    expected = formula(objective.how, LOGPS, REFERENCES, TOKENS, WANTED, KL)
    np.testing.assert_allclose(found, expected, rtol=2e-6)


def test_orpo_is_exact_where_an_answer_is_almost_certain() -> None:
    loss, how = LOSSES["orpo"][0], ObjectiveOptions(objective="orpo", beta=0.25)
    logps = mx.array([-4e-5, -1.5e-3, -5e-7, -3.0, -2.0, -1e-6, 0.0, -3.0])
    tokens = mx.array([4.0, 3.0, 2.0, 2.0, 4.0, 1.0, 1.0, 1.0])

    def losses(logps: mx.array) -> mx.array:
        return loss(AnswerScores(logps, logps, tokens, mx.array(True), mx.array(0.0)), how)

    slopes = np.array(mx.grad(lambda logps: losses(logps).sum())(logps))
    # Those of TRL 1.16's ORPOTrainer; for the last pair its gradient is not a number.
    trl = [4.959454294294e-3, 2.67951065779926e-7, 3.84569001197815]
    np.testing.assert_allclose(np.array(losses(logps))[:3], trl, rtol=2e-6)
    trl = [-122.77016449, 3.26800466, -0.53590214, 1.15534595e-8, -0.40884313, 249999.734375]
    np.testing.assert_allclose(slopes[:6], trl, rtol=2e-6)
    assert np.isfinite(slopes).all()


def test_answers_know_what_their_rows_know_and_count_their_tokens() -> None:
    batch = batch_of(6)
    for part in [*pack(batch, 2, together=2), *split(batch, 1, 0, 2)]:
        rows = part.first_row + part.row_numbers
        answers = AnswerScores.of(mx.array(LOGPS[rows].astype(np.float32)), part)
        assert np.array(answers.wanted).tolist() == [row % 2 == 0 for row in rows]
        np.testing.assert_array_equal(answers.tokens, batch.counts.sum(axis=1)[rows])
        np.testing.assert_allclose(answers.references, batch.known_of(REFERENCE)[rows], rtol=1e-6)
        np.testing.assert_array_equal(answers.baseline, [KL] * len(rows))


def test_every_objective_has_a_loss() -> None:
    assert set(LOSSES) == set(OBJECTIVES)


def test_options_of_preferences_are_an_objective_and_those_of_sft_none() -> None:
    assert Objective.of(ObjectiveOptions()) is None
    how = ObjectiveOptions(objective="kto")
    assert Objective.of(how) == Objective(how)


def test_rewards_are_gains_where_the_start_is_compared_and_probabilities_elsewhere() -> None:
    batch = batch_of(2)
    references = batch.known_of(REFERENCE)
    tokens = batch.counts.sum(axis=1)
    logps = np.array([-12.5, -30.25])
    for name, beta, wanted in (
        ("dpo", 0.1, logps - references),
        ("kto", 0.1, logps - references),
        ("cpo", 0.1, logps),
        ("orpo", 0.25, logps / tokens),
        ("simpo", 2.0, logps / tokens),
    ):
        objective = objective_of(name)
        found = objective.rewards(mx.array(logps.astype(np.float32)), batch)
        np.testing.assert_allclose(found, beta * wanted, rtol=1e-6)
        assert objective.rewards_gains == (name in ("dpo", "kto"))
        assert objective.swaps == (name == "kto")


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_objectives", raising=False)
    return write_own_objective(tmp_path)


def test_the_objective_of_a_module_is_the_function_in_it(own: str) -> None:
    ours, theirs = Objective(ObjectiveOptions(objective=own)), objective_of("dpo, hinge")
    ours.how.check_objective()
    assert (ours.facts.is_paired, ours.facts.has_reference, ours.swaps) == (True, True, False)
    (part,), logps = split(batch_of(6), 1, 0, 6), mx.array(LOGPS.astype(np.float32))
    for compute in (Objective.losses, Objective.slopes, Objective.rewards):
        np.testing.assert_array_equal(compute(ours, logps, part), compute(theirs, logps, part))
    with pytest.raises(UserError, match="label_smoothing"):
        ObjectiveOptions(objective=own, label_smoothing=0.1).check_objective()


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("dop", "'dop'"),
        ("no_such_module:mine", "No module named 'no_such_module'"),
        ("my_objectives:theirs", "theirs"),
        ("my_objectives:hinge", "function"),
        (":", "':'"),
        ("./mine.py:f", "'./mine.py:f'"),
    ],
)
def test_a_bad_objective_is_named(own: str, name: str, fault: str) -> None:
    with pytest.raises(UserError) as caught:
        ObjectiveOptions(objective=name).check_objective()
    assert caught.value.problem.startswith("objective is ")
    assert fault in caught.value.problem


# Through stages.


def batch_of(rows: int, seed: int = 4) -> Batch:
    """Rows of a prompt and an answer each, with references near what the tiny model says."""
    random = np.random.RandomState(seed)
    lengths = random.randint(6, 40, size=rows)
    starts = [random.randint(1, length - 1) for length in lengths]
    ends = np.cumsum(lengths)
    bounds = np.stack([ends - lengths, ends, starts], axis=1)
    known = np.zeros((rows, KNOWN))
    known[:, 0] = np.arange(rows) % 2 == 0
    known[:, 1] = -np.log(VOCABULARY) * (lengths - starts) + random.normal(0, 3, rows)
    known[:, BASELINE] = KL
    tokens = random.randint(1, VOCABULARY, size=ends[-1]).astype(np.int32)
    return make_batch(Samples(tokens, bounds, known), 2048)


def one_process(model: Any, batch: Batch, objective: Objective) -> tuple[float, Gradients]:
    """Mean loss and its gradients: mlx-lm's whole model, all logits at once, the papers' formula
    in MLX's automatic gradients."""
    inputs, targets = mx.array(batch.inputs), mx.array(batch.targets)
    counts = mx.array(batch.counts.astype(np.float32))

    def loss(model: Any) -> mx.array:
        logits = model(inputs).astype(mx.float32)
        logps = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        of_tokens = mx.take_along_axis(logps, targets[..., None], axis=-1)[..., 0]
        losses = objective.losses((of_tokens * counts).sum(axis=1), batch)
        return losses.mean()

    value, gradients = nn.value_and_grad(model, loss)(model)
    mx.eval(value, gradients)
    flat: Any = dict(tree_flatten(gradients))
    return value.item(), {name: np.array(each) for name, each in flat.items()}


LAYOUTS = [
    (Layout("1f1b", 2), True),
    (Layout("zb-v", 2, virtual=2), False),
    (Layout("gpipe", 2, dp=2), True),
    (Layout("interleaved-1f1b", 2, virtual=2), False),
    (Layout("zb-h1", 4), False),
]
"""Layouts, and whether rows are packed."""


@pytest.mark.parametrize(
    ("case", "layout", "packed"),
    [
        *((case, Layout("1f1b", 1), False) for case in CASES),
        *((case, *layout) for case in ("dpo", "kto") for layout in LAYOUTS),
    ],
    ids=str,
)
def test_loss_and_gradients_are_those_of_one_process(
    case: str, layout: Layout, packed: bool
) -> None:
    objective, batch = objective_of(case), batch_of(8)
    expected, gradients = one_process(tiny_model(), batch, objective)
    together = 2 if objective.facts.is_paired else 1
    plan = replace(layout.plan(8, 8 // layout.dp, 2, pack=packed), together=together)

    def step(transport: Any) -> Any:
        savings = Savings(loss_chunk=9)
        model = tiny_model()
        return run_engine(transport, plan, model, batch, savings=savings, objective=objective)

    outcomes = LocalNetwork(layout.ranks).run(step)
    pairs = 8 // together
    found = sum(loss for outcome in outcomes for loss in outcome.losses.values()) / pairs
    evaluated = sum(loss for outcome in outcomes for loss in outcome.evaluated.values()) / pairs
    assert found == pytest.approx(expected, rel=1e-6)
    assert evaluated == pytest.approx(expected, rel=1e-6)
    for outcome in outcomes:
        assert largest_difference(outcome.gradients, gradients)[0] < 1e-5


def test_a_loss_takes_pieces_that_is_longer_than_a_chunk_or_of_answers() -> None:
    part = Slice(tiny_model(layers=1), 0, 1)
    (both,) = split(batch_of(2), 1, 0, 2)
    rows, length = both.shape
    takes = [
        Head(part, savings, compiled=False, objective=each).takes_pieces(both)
        for savings, each in (
            (NO_SAVINGS, None),
            (Savings(loss_chunk=rows * length), None),
            (Savings(loss_chunk=rows * length - 1), None),
            (NO_SAVINGS, objective_of("dpo")),
        )
    ]
    assert takes == [False, False, True, True]


def test_of_a_pair_both_answers_are_in_one_micro_batch() -> None:
    batch = batch_of(10)
    for parts in (pack(batch, 3, together=2), split(batch, 1, 0, 4)):
        held = [(part.first_row + part.row_numbers).tolist() for part in parts]
        assert sorted(row for rows in held for row in rows) == [*range(10)]
        assert all(row + 1 in rows for rows in held for row in rows if row % 2 == 0)
