"""Losses of tokens: Tinker's formulas in NumPy, and through stages their gradients."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from shardmlx.config.specs import NO_SAVINGS, Savings
from shardmlx.engine.batches import MicroBatch
from shardmlx.engine.loss import Head, HeadInput
from shardmlx.engine.token_losses import LOSSES, TokenLoss, TokenTerms
from shardmlx.models.runtime.packed_positions import PackedPositions
from shardmlx.models.runtime.slice import Slice
from shardmlx.models.runtime.tuner import LoRALinear
from testbed.tiny_models import VOCABULARY
from tests.helpers.models_and_batches import through_stages, tiny_model, with_adapters

LENGTHS = (9, 4, 14)
ENDS = np.cumsum(LENGTHS)
COUNT = int(ENDS[-1])
POSITIONS = len(LENGTHS) * max(LENGTHS)

CASES: Mapping[str, Mapping[str, float]] = {
    "cross_entropy": {},
    "importance_sampling": {},
    "ppo": {},
    "ppo, clipped tightly": {"clip_low_threshold": 0.95, "clip_high_threshold": 1.02},
    "ppo, clipped by token": {},
    "cispo": {},
    "cispo, from below": {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1},
    "dro": {},
    "dro, strong": {"beta": 0.7},
    "gspo": {},
    "gspo, clipped loosely": {"clip_low_threshold": 0.5, "clip_high_threshold": 2.0},
}


def inputs_of(case: str, logps: np.ndarray) -> dict[str, np.ndarray]:
    """Inputs of a loss whose ratios of probabilities lie around 1, for log-probabilities now."""
    random = np.random.RandomState(7)
    if case == "cross_entropy":
        weights = random.uniform(-1, 2, COUNT).astype(np.float32)
        return {"weights": weights * (random.uniform(size=COUNT) < 0.6)}
    inputs = {
        "logprobs": (logps + random.normal(0, 0.3, COUNT)).astype(np.float32),
        "advantages": random.normal(0, 1, COUNT).astype(np.float32),
    }
    inputs["advantages"] *= random.uniform(size=COUNT) < 0.8
    if case.startswith("gspo"):
        inputs["sequence_ratio_mask"] = (random.uniform(size=COUNT) < 0.6).astype(np.float32)
        inputs["sequence_ratio_mask"][0] = 1
    if case.endswith("by token"):
        inputs["clip_low_threshold"] = random.uniform(0.7, 1, COUNT).astype(np.float32)
        inputs["clip_high_threshold"] = random.uniform(1, 1.3, COUNT).astype(np.float32)
    return inputs


DEFAULTS = {"ppo": (0.8, 1.2), "cispo": (0.0, 4.0), "gspo": (0.9997, 1.0004)}


def formula(case: str, logps: mx.array, inputs: Mapping[str, np.ndarray]) -> mx.array:
    """The loss as Tinker documents it in torch, of all rows; ``stop_gradient`` is its detach."""
    name = case.partition(",")[0]
    if name == "cross_entropy":
        return -(logps * mx.array(inputs["weights"])).sum()
    sampled, advantages = (mx.array(inputs[each]) for each in ("logprobs", "advantages"))
    beta = CASES[case].get("beta", 0.1)
    if name == "dro":
        return -(logps * advantages - 0.5 * beta * mx.square(logps - sampled)).sum()
    ratios = mx.exp(logps - sampled)
    if name == "importance_sampling":
        return -(ratios * advantages).sum()
    keys = ("clip_low_threshold", "clip_high_threshold")
    both = zip(keys, DEFAULTS[name], strict=True)
    low, high = (mx.array(inputs.get(key, CASES[case].get(key, usual))) for key, usual in both)
    if name == "cispo":
        return -(mx.stop_gradient(mx.clip(ratios, low, high)) * logps * advantages).sum()
    if name == "gspo":
        rows = []
        start = 0
        for end in ENDS.tolist():
            own, then = logps[start:end], sampled[start:end]
            marked = mx.array(inputs["sequence_ratio_mask"][start:end])
            mean = (mx.stop_gradient(own) - then) * marked
            rows.append(mx.exp(mean.sum() / marked.sum() + own - mx.stop_gradient(own)))
            start = end
        ratios = mx.concatenate(rows)
    clipped = mx.clip(ratios, low, high)
    return -mx.minimum(ratios * advantages, clipped * advantages).sum()


def rows(targets: np.ndarray, loss: TokenLoss, inputs: Any, *, is_packed: bool) -> MicroBatch:
    """A micro-batch of rows of random tokens, with these targets."""
    random = np.random.RandomState(3)
    tokens = np.zeros((len(LENGTHS), max(LENGTHS) + 1), np.int32)
    for row, length in enumerate(LENGTHS):
        tokens[row, :length] = random.randint(0, VOCABULARY, length)
    places = None
    if is_packed:
        numbers = np.repeat(np.arange(len(LENGTHS), dtype=np.int32), LENGTHS)
        positions = np.concatenate([np.arange(each, dtype=np.int32) for each in LENGTHS])
        places = PackedPositions(numbers, positions)
    spans = np.array([(1, length) for length in LENGTHS], np.int32)
    terms = TokenTerms(loss, targets.astype(np.int32), inputs, ENDS)
    return MicroBatch(tokens, spans, 0, places, terms=terms)


def model_of(*, adapted_head: bool) -> nn.Module:
    model = with_adapters(tiny_model(layers=4))
    for name, module in model.named_modules():
        if isinstance(module, LoRALinear):
            key = mx.random.key(len(name))
            module.lora_b = 0.1 * mx.random.normal(module.lora_b.shape, key=key)
    if adapted_head:
        head = LoRALinear.from_base(model.lm_head, r=4, dropout=0.0, scale=2.0)
        head.lora_b = 0.1 * mx.random.normal(head.lora_b.shape, key=mx.random.key(1))
        head.linear.freeze()
        model.lm_head = head
    return model


def logps_of(model: nn.Module, batch: MicroBatch, targets: np.ndarray) -> mx.array:
    """The log-probabilities of all targets by mlx-lm's own model, row by row."""
    found = []
    start = 0
    for row, length in enumerate(LENGTHS):
        logits = model(mx.array(batch.tokens[row : row + 1, :length]))[0]
        own = mx.array(targets[start : start + length]).reshape(length, -1)
        scores = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        picked = mx.take_along_axis(scores, own, axis=-1)
        found.append(picked.reshape(targets[start : start + length].shape))
        start += length
    return mx.concatenate(found)


@pytest.mark.parametrize("case", CASES)
def test_values_and_slopes_are_those_of_the_formulas(case: str) -> None:
    logps = np.random.RandomState(1).normal(-2, 1, COUNT)
    inputs = inputs_of(case, logps)
    loss = TokenLoss(case.partition(",")[0], CASES[case])
    terms = TokenTerms(loss, np.zeros(COUNT, np.int32), inputs, ENDS)
    with mx.stream(mx.cpu):
        value, slopes = mx.value_and_grad(lambda each: formula(case, each, inputs))(mx.array(logps))
    assert loss.value(logps, terms) == pytest.approx(value.item(), rel=2e-6)
    np.testing.assert_allclose(loss.slopes(logps, terms), np.array(slopes), rtol=2e-6, atol=1e-6)


def test_every_case_clips_some_tokens_and_not_others() -> None:
    logps = np.random.RandomState(1).normal(-2, 1, COUNT)
    for case in ("ppo", "ppo, clipped tightly", "ppo, clipped by token"):
        inputs = inputs_of(case, logps)
        terms = TokenTerms(TokenLoss("ppo", CASES[case]), np.zeros(COUNT), inputs, ENDS)
        slopes = terms.loss.slopes(logps, terms)
        assert 0 < (slopes == 0).sum() < COUNT


PIECES = Savings(loss_chunk=5)


@pytest.mark.parametrize("savings", [NO_SAVINGS, PIECES], ids=["one piece", "pieces"])
@pytest.mark.parametrize("is_packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("case", ["cross_entropy", "ppo", "gspo", "dro"])
def test_gradients_through_stages_are_those_of_one_model(
    case: str, is_packed: bool, savings: Savings
) -> None:
    targets = np.random.RandomState(5).randint(0, VOCABULARY, COUNT)
    model = model_of(adapted_head=True)
    loss = TokenLoss(case)
    plain = rows(targets, loss, {}, is_packed=False)
    now = logps_of(model, plain, targets)
    inputs = inputs_of(case, np.array(now))

    def whole(model: nn.Module) -> mx.array:
        return 0.5 * formula(case, logps_of(model, plain, targets), inputs)

    _, expected = nn.value_and_grad(model, whole)(model)
    batch = rows(targets, loss, inputs, is_packed=is_packed)
    (found,), gradients = through_stages(
        model_of(adapted_head=True), [(0, 2), (2, 4)], [batch], scale=0.5, savings=savings
    )
    np.testing.assert_allclose(np.array(found), np.array(now), atol=3e-6)
    for name, gradient in tree_flatten(expected):
        scale = float(np.abs(np.array(gradient)).max())
        np.testing.assert_allclose(gradients[name], np.array(gradient), atol=1e-5 * scale + 1e-7)


@pytest.mark.parametrize("several", [3, VOCABULARY])
def test_soft_targets_of_the_whole_vocabulary_are_the_full_divergence(several: int) -> None:
    random = np.random.RandomState(5)
    targets = np.stack([random.permutation(VOCABULARY)[:several] for _ in range(COUNT)])
    weights = random.dirichlet(np.ones(several), COUNT).astype(np.float32)
    model = model_of(adapted_head=False)
    loss = TokenLoss("cross_entropy")
    batch = rows(targets, loss, {"weights": weights}, is_packed=False)

    def divergence(model: nn.Module) -> mx.array:
        # The teacher's entropy is a constant.
        return -(mx.array(weights) * logps_of(model, batch, targets)).sum()

    value, expected = nn.value_and_grad(model, divergence)(model)
    ranges = [(0, 2), (2, 4)]
    (found,), gradients = through_stages(
        model_of(adapted_head=False), ranges, [batch], scale=1.0, savings=PIECES
    )
    assert np.array(found).shape == (COUNT, several)
    assert batch.terms is not None
    assert loss.value(np.array(found), batch.terms) == pytest.approx(value.item(), rel=1e-6)
    for name, gradient in tree_flatten(expected):
        scale = float(np.abs(np.array(gradient)).max())
        np.testing.assert_allclose(gradients[name], np.array(gradient), atol=1e-5 * scale + 1e-7)


def test_positions_without_a_slope_have_no_gradient_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those of prompts, whose weights are 0: their log-probabilities come all the same."""
    targets = np.random.RandomState(5).randint(0, VOCABULARY, COUNT)
    weights = np.where(np.arange(COUNT) % 3 == 0, 1.0, 0.0).astype(np.float32)
    batch = rows(targets, TokenLoss("cross_entropy"), {"weights": weights}, is_packed=False)
    part = Slice(model_of(adapted_head=True), 0, 4)
    head = Head(part, Savings(loss_chunk=1), compiled=False)
    given = HeadInput(mx.random.normal((*batch.shape, part.hidden_size)), batch)
    count = 0

    def gradients(*given: Any, **how: Any) -> Any:
        nonlocal count
        count += 1
        return head._loss_graph(*given, **how)

    monkeypatch.setattr(head, "_loss_of", gradients)
    result, gradient, given = head.result_and_gradient(given)
    assert count == weights.sum()
    np.testing.assert_array_equal(np.array(result), np.array(head.result(given)))
    is_zero = (np.array(gradient) == 0).all(axis=-1)
    mask = np.zeros(batch.shape, bool)
    mask[batch.counts] = weights > 0
    np.testing.assert_array_equal(is_zero, ~mask)


@pytest.mark.parametrize(
    ("dtype", "chunk", "pieces"),
    [
        pytest.param(mx.float32, POSITIONS, [COUNT - 8, 8], id="as long as a chunk"),
        pytest.param(mx.float32, POSITIONS - 2, [20, COUNT - 20], id="longer"),
        pytest.param(mx.bfloat16, POSITIONS, [21, COUNT - 21], id="16 bits"),
    ],
)
def test_a_cpu_has_one_piece_of_what_learns_in_a_micro_batch_as_long_as_a_chunk(
    monkeypatch: pytest.MonkeyPatch, dtype: mx.Dtype, chunk: int, pieces: list[int]
) -> None:
    targets = np.random.RandomState(5).randint(0, VOCABULARY, COUNT)
    weights = (np.arange(COUNT) >= 8).astype(np.float32)
    batch = rows(targets, TokenLoss("cross_entropy"), {"weights": weights}, is_packed=False)
    part = Slice(model_of(adapted_head=False), 0, 4)
    head = Head(part, Savings(loss_chunk=chunk), compiled=False)
    widths: list[int] = []
    logits = part.logits

    def counted(states: mx.array, **how: Any) -> mx.array:
        widths.append(states.shape[1])
        return logits(states, **how)

    monkeypatch.setattr(part, "logits", counted)
    states = mx.random.normal((*batch.shape, part.hidden_size)).astype(dtype)
    result, _, _ = head.result_and_gradient(HeadInput(states, batch))
    assert [*dict.fromkeys(widths)] == pieces
    np.testing.assert_array_equal(np.array(result), np.array(head.result(HeadInput(states, batch))))


def test_one_piece_of_a_whole_chunk_has_the_memory_of_two_arrays_of_logits() -> None:
    """Its gradient takes the room of the logits: four arrays of half a chunk are planned."""
    chunk, vocabulary = 96, 30_000
    part = Slice(tiny_model(layers=1, vocab_size=vocabulary), 0, 1)
    head = Head(part, Savings(loss_chunk=chunk), compiled=False)
    targets = np.random.RandomState(5).randint(0, vocabulary, chunk).astype(np.int32)
    terms = TokenTerms(
        TokenLoss("cross_entropy"),
        targets,
        {"weights": np.ones(chunk, np.float32)},
        np.array([chunk]),
    )
    tokens = np.ones((1, chunk + 1), np.int32)
    batch = MicroBatch(tokens, np.array([(1, chunk)], np.int32), 0, terms=terms)
    states = mx.random.normal((*batch.shape, part.hidden_size))
    mx.eval(states, part.parameters())
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    mx.eval(head.result_and_gradient(HeadInput(states, batch))[:2])
    assert mx.get_peak_memory() - before <= 2 * chunk * vocabulary * 4 + (1 << 18)


@pytest.fixture
def uncompiled() -> Iterator[None]:
    """A compiled piece computes what it does at once: a kernel takes a second of C++ on a CPU."""
    mx.disable_compile()
    yield
    mx.enable_compile()


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("several", [(), (3,)], ids=["one target", "three targets"])
def test_positions_that_fill_up_a_compiled_piece_change_nothing(
    several: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    random = np.random.RandomState(5)
    targets = random.randint(0, VOCABULARY, (COUNT, *several))
    weights = random.uniform(0.1, 1, targets.shape).astype(np.float32)
    batch = rows(targets, TokenLoss("cross_entropy"), {"weights": weights}, is_packed=False)
    part = Slice(model_of(adapted_head=True), 0, 4)
    states = mx.random.normal((*batch.shape, part.hidden_size), key=mx.random.key(6))
    widths: set[int] = set()
    logits = part.logits

    def counted(states: mx.array, **how: Any) -> mx.array:
        widths.add(states.shape[1])
        return logits(states, **how)

    monkeypatch.setattr(part, "logits", counted)
    found = []
    for compiled in (False, True):
        widths.clear()
        head = Head(part, NO_SAVINGS, compiled=compiled)
        result, gradient, given = head.result_and_gradient(HeadInput(states, batch))
        sums: dict[str, mx.array] = {}
        head.add_gradients(given, sums)
        found.append([np.array(each) for each in (result, gradient, *sums.values())])
    assert widths == {32}
    assert len(found[0]) == 4
    for plain, filled in zip(*found, strict=True):
        np.testing.assert_allclose(filled, plain, rtol=1e-5, atol=1e-6)


def test_the_losses_are_tinkers() -> None:
    assert set(LOSSES) == {"cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "gspo"}
    assert {name: dict(facts.settings) for name, facts in LOSSES.items()} == {
        "cross_entropy": {},
        "importance_sampling": {},
        "ppo": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
        "cispo": {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0},
        "dro": {"beta": 0.1},
        "gspo": {"clip_low_threshold": 1 - 3e-4, "clip_high_threshold": 1 + 4e-4},
    }
