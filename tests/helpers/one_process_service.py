"""A service of training in one process, of plain MLX and nothing of ours but its messages: what the
wire is tested over, and an independent reference. A character is a token."""

from __future__ import annotations

import io
import json
import math
import queue
import tarfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_map, tree_unflatten
from mlx_lm.models import llama

from shardmlx.api.requests import (
    CreateModel,
    DeleteState,
    DropSnapshot,
    ForwardBackward,
    LoadState,
    LoopEnded,
    LoraOptions,
    LossResult,
    LossRow,
    NoRoom,
    OptimStep,
    Request,
    SampledAnswer,
    SamplePrompt,
    SampleResult,
    SavedState,
    SaveState,
    TakeSnapshot,
    TopTokens,
    UnloadModel,
)
from shardmlx.errors import UserError
from shardmlx.models.runtime.tuner import LoRALinear

VOCABULARY = 128
END = 3
"""The token that ends a text."""

MOST_SNAPSHOTS = 3

Tree = dict[str, Any]


@dataclass
class Adapter:
    """A LoRA that trains: weights, gradients so far, and AdamW's moments."""

    lora: LoraOptions
    weights: Tree
    gradients: Tree | None = None
    first: Tree | None = None
    second: Tree | None = None
    steps: int = 0


def base_model(seed: int = 1) -> Any:
    """Return two llama layers, float32, whose weights are frozen."""
    mx.random.seed(seed)
    arguments = llama.ModelArgs(
        model_type="llama",
        hidden_size=32,
        num_hidden_layers=2,
        intermediate_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        rms_norm_eps=1e-5,
        vocab_size=VOCABULARY,
        tie_word_embeddings=False,
    )
    model = llama.Model(arguments)
    model.freeze()
    return model


def linear_layers(model: Any) -> list[tuple[str, Any]]:
    """Return all linear layers of a model, and their names."""
    return [(name, each) for name, each in model.named_modules() if type(each) is nn.Linear]


def add_loras(model: Any, layers: Sequence[tuple[str, Any]], lora: LoraOptions) -> None:
    """Give the model's linear ``layers`` new LoRAs, where the options want one."""
    mx.random.seed(lora.seed)
    parts = {"self_attn": lora.attention, "mlp": lora.mlp, "lm_head": lora.unembed}
    chosen = []
    for name, layer in layers:
        (is_wanted,) = (wanted for part, wanted in parts.items() if part in name.split("."))
        scale = 32 / lora.rank
        new = LoRALinear.from_base(layer, r=lora.rank, scale=scale) if is_wanted else layer
        chosen.append((name, new))
    model.update_modules(tree_unflatten(chosen))


def token_losses(name: str, logprobs: mx.array, inputs: Mapping[str, mx.array]) -> mx.array:
    """Return the losses of a row's tokens, as Tinker documents them."""
    if name == "cross_entropy":
        weights = inputs.get("weights")
        return -logprobs if weights is None else -logprobs * weights
    ratio = mx.exp(logprobs - inputs["logprobs"])
    advantages = inputs["advantages"]
    low = inputs.get("clip_low_threshold", mx.array(0.8))
    high = inputs.get("clip_high_threshold", mx.array(1.2))
    if name == "importance_sampling":
        return -ratio * advantages
    if name == "ppo":
        return -mx.minimum(ratio * advantages, mx.clip(ratio, low, high) * advantages)
    if name == "cispo":
        return -mx.stop_gradient(mx.clip(ratio, low, high)) * logprobs * advantages
    raise UserError(f"the loss is {name}", "it is not in this reference")


@dataclass
class OneProcessService:
    """The service. It keeps states as files of ``directory``, which another one finds."""

    directory: Path
    most_tokens: int = 256
    most_models: int = 100
    holds: threading.Event = field(default_factory=threading.Event)
    """Requests are carried out while it is set."""
    ends: threading.Event = field(default_factory=threading.Event)
    """Requests that were carried out are answered while it is set."""
    takes_rows: threading.Event = field(default_factory=threading.Event)
    """Rows are taken in while it is set: ``submit`` waits."""
    submitted: list[Future[Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._waiting: queue.Queue[tuple[Request, Future[Any]] | None] = queue.Queue()
        self._models: dict[str, Adapter] = {}
        self._snapshots: dict[str, Adapter] = {}
        self.holds.set()
        self.ends.set()
        self.takes_rows.set()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def submit(self, request: Request) -> Future[Any]:
        if isinstance(request, ForwardBackward):
            self.takes_rows.wait()
        future: Future[Any] = Future()
        self.submitted.append(future)
        self._waiting.put((request, future))
        return future

    def close(self) -> None:
        """Carry out what waits, and end."""
        self.holds.set()
        self.ends.set()
        self.takes_rows.set()
        self._waiting.put(None)
        self._thread.join()

    def fail(self, reason: str) -> None:
        """Fail what waits, as a service does that has lost a rank."""
        for future in self.submitted:
            if not future.done():
                future.set_exception(LoopEnded(reason))

    def states(self) -> Sequence[SavedState]:
        found = []
        for path in self.directory.rglob("state.json"):
            said = json.loads(path.read_text())
            lora = LoraOptions(**said.pop("lora"))
            found.append(SavedState(lora=lora, **said))
        return sorted(found, key=lambda each: each.saved_at)

    def export(self, state: str) -> bytes:
        if state not in [each.state for each in self.states()]:
            raise UserError(f"there is no state {state}")
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w") as archive:
            archive.add(self._place(state) / "weights.npz", "adapters.npz")
        return packed.getvalue()

    def _run(self) -> None:
        self._base = base_model()
        self._layers = linear_layers(self._base)
        works: dict[type, Callable[[Any], Any]] = {
            CreateModel: self._create,
            UnloadModel: self._unload,
            ForwardBackward: self._forward_backward,
            OptimStep: self._step,
            SaveState: self._save,
            LoadState: self._load,
            DeleteState: self._delete,
            TakeSnapshot: self._take,
            DropSnapshot: self._drop,
            SamplePrompt: self._sample,
        }
        while (item := self._waiting.get()) is not None:
            request, future = item
            self.holds.wait()
            if future.done() or not future.set_running_or_notify_cancel():
                continue
            try:
                result = works[type(request)](request)
                self.ends.wait()
                future.set_result(result)
            except Exception as error:
                future.set_exception(error)

    # Models.

    def _model(self, name: str) -> Adapter:
        if name not in self._models:
            raise UserError(f"there is no model {name}")
        return self._models[name]

    def _create(self, request: CreateModel) -> str:
        if len(self._models) >= self.most_models:
            raise NoRoom(f"there are {self.most_models} models", "unload one")
        if request.state is not None:
            adapter = self._read(request.state, request.with_optimizer)
        else:
            assert request.lora is not None
            add_loras(self._base, self._layers, request.lora)
            adapter = Adapter(request.lora, self._base.trainable_parameters())
        self._models[request.name] = adapter
        return request.name

    def _unload(self, request: UnloadModel) -> None:
        del self._models[request.model]

    def _use(self, adapter: Adapter) -> None:
        add_loras(self._base, self._layers, adapter.lora)
        self._base.update(adapter.weights)

    def _forward_backward(self, request: ForwardBackward) -> LossResult:
        adapter = self._model(request.model)
        for number, row in enumerate(request.rows):
            self._check(row, f"row {number}")
        self._use(adapter)
        total = 0.0
        logprobs = []
        for row in request.rows:
            value, found, gradients = self._row(request, adapter, row)
            total += value
            logprobs.append(found)
            if not request.forward_only:
                before = adapter.gradients
                adapter.gradients = (
                    gradients
                    if before is None
                    else tree_map(lambda one, other: one + other, before, gradients)
                )
                mx.eval(adapter.gradients)
        return LossResult(logprobs, {"loss:sum": total})

    def _check(self, row: LossRow, where: str) -> None:
        if len(row.tokens) == 0:
            raise UserError(f"{where} is empty")
        if row.tokens.min() < 0 or row.tokens.max() >= VOCABULARY:
            raise UserError(f"{where} has a token beyond the vocabulary")
        for name, values in row.inputs.items():
            if len(values) != len(row.tokens):
                raise UserError(f"{where}: {name} has another length")
            if not np.isfinite(values).all():
                raise UserError(f"{where}: {name} is not finite")
        if "target_tokens" not in row.inputs:
            raise UserError(f"{where} has no target_tokens")

    def _row(
        self, request: ForwardBackward, adapter: Adapter, row: LossRow
    ) -> tuple[float, np.ndarray, Tree]:
        tokens = mx.array(row.tokens)[None]
        targets = mx.array(row.inputs["target_tokens"])
        inputs = {name: mx.array(values) for name, values in row.inputs.items()}

        def loss(weights: Tree) -> tuple[mx.array, mx.array]:
            self._base.update(weights)
            logits = self._base(tokens)[0]
            known = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
            places = targets if targets.ndim == 2 else targets[:, None]
            found = mx.take_along_axis(known, places, axis=-1).reshape(targets.shape)
            return token_losses(request.loss, found, inputs).sum(), found

        (value, found), gradients = mx.value_and_grad(loss)(adapter.weights)
        mx.eval(value, found, gradients)
        return float(value), np.array(found), gradients

    def _step(self, request: OptimStep) -> Mapping[str, float]:
        adapter = self._model(request.model)
        zeros = tree_map(mx.zeros_like, adapter.weights)
        gradients = zeros if adapter.gradients is None else adapter.gradients
        norm = math.sqrt(sum(float(mx.square(each).sum()) for _, each in tree_flatten(gradients)))
        if 0 < request.grad_clip_norm < norm:
            scale = request.grad_clip_norm / norm
            gradients = tree_map(lambda each: each * scale, gradients)
        adapter.steps += 1
        one, two, t = request.beta1, request.beta2, adapter.steps
        adapter.first = tree_map(
            lambda m, g: one * m + (1 - one) * g, adapter.first or zeros, gradients
        )
        adapter.second = tree_map(
            lambda v, g: two * v + (1 - two) * g * g, adapter.second or zeros, gradients
        )
        rate = request.learning_rate
        adapter.weights = tree_map(
            lambda w, m, v: (
                w * (1 - rate * request.weight_decay)
                - rate * (m / (1 - one**t)) / (mx.sqrt(v / (1 - two**t)) + request.eps)
            ),
            adapter.weights,
            adapter.first,
            adapter.second,
        )
        adapter.gradients = None
        mx.eval(adapter.weights, adapter.first, adapter.second)
        return {"grad_norm": norm}

    # States.

    def _place(self, state: str) -> Path:
        return self.directory / state

    def _save(self, request: SaveState) -> SavedState:
        adapter = self._model(request.model)
        place = self._place(request.state)
        if (place / "state.json").exists() and not request.overwrite:
            raise UserError(f"there is a state {request.state} already")
        place.mkdir(parents=True, exist_ok=True)
        trees: dict[str, Any] = {"weights": adapter.weights}
        if not request.for_sampler and adapter.first is not None:
            trees |= {"first": adapter.first, "second": adapter.second}
        for name, tree in trees.items():
            arrays: Any = {key: np.array(value) for key, value in tree_flatten(tree)}
            np.savez(place / f"{name}.npz", **arrays)
        saved = {
            "state": request.state,
            "lora": {name: getattr(adapter.lora, name) for name in LoraOptions.__slots__},
            "nbytes": sum(each.stat().st_size for each in place.glob("*.npz")),
            "saved_at": time.time(),
            "has_optimizer": not request.for_sampler,
            "note": dict(request.note),
        }
        (place / "steps").write_text(str(adapter.steps))
        (place / "state.json").write_text(json.dumps(saved))
        return next(each for each in self.states() if each.state == request.state)

    def _read(self, state: str, with_optimizer: bool) -> Adapter:
        place = self._place(state)
        found = [each for each in self.states() if each.state == state]
        if not found:
            raise UserError(f"there is no state {state}")
        trees: dict[str, Any] = {}
        for path in place.glob("*.npz"):
            arrays = {name: mx.array(value) for name, value in np.load(path).items()}
            trees[path.stem] = tree_unflatten(list(arrays.items()))
        if with_optimizer and not found[0].has_optimizer:
            raise UserError(f"the state {state} has no optimizer's")
        if not with_optimizer:
            return Adapter(found[0].lora, trees["weights"])
        steps = int((place / "steps").read_text())
        return Adapter(found[0].lora, steps=steps, **trees)

    def _load(self, request: LoadState) -> None:
        self._model(request.model)
        self._models[request.model] = self._read(request.state, request.with_optimizer)

    def _delete(self, request: DeleteState) -> None:
        (self._place(request.state) / "state.json").unlink()

    # Samples.

    def _take(self, request: TakeSnapshot) -> None:
        if request.snapshot in self._snapshots:
            raise UserError(f"there is a snapshot {request.snapshot}")
        if len(self._snapshots) == MOST_SNAPSHOTS:
            raise NoRoom(f"there are {MOST_SNAPSHOTS} snapshots", "drop one")
        if request.model is not None:
            model = self._model(request.model)
            adapter = Adapter(model.lora, model.weights)
        else:
            assert request.state is not None
            times = [each.saved_at for each in self.states() if each.state == request.state]
            if request.saved_at is not None and times != [request.saved_at]:
                raise UserError(f"{request.state} was saved anew")
            adapter = self._read(request.state, with_optimizer=False)
        self._snapshots[request.snapshot] = adapter

    def _drop(self, request: DropSnapshot) -> None:
        del self._snapshots[request.snapshot]

    def _sample(self, request: SamplePrompt) -> SampleResult:
        if min(request.tokens) < 0 or max(request.tokens) >= VOCABULARY:
            raise UserError("the prompt has a token beyond the vocabulary")
        if len(request.tokens) + request.max_tokens > self.most_tokens:
            raise UserError(f"prompt and answer have more than {self.most_tokens} tokens")
        if request.snapshot is None:
            self._use(Adapter(LoraOptions(), tree_map(mx.zeros_like, self._zero())))
        else:
            self._use(self._snapshots[request.snapshot])
        random = np.random.default_rng(request.seed)
        answers = [self._answer(request, random) for _ in range(request.count)]
        prompt = self._logprobs(request.tokens)
        told, top = None, None
        if request.prompt_logprobs:
            told = np.full(len(request.tokens), np.nan, np.float32)
            told[1:] = prompt[np.arange(len(request.tokens) - 1), request.tokens[1:]]
            if request.last_prompt_tokens is not None:
                told[: -request.last_prompt_tokens] = np.nan
        if request.top_prompt_logprobs:
            shifted = np.concatenate([np.full((1, VOCABULARY), -np.inf), prompt[:-1]])
            top = top_of(shifted, request.top_prompt_logprobs)
        return SampleResult(answers, told, top)

    def _zero(self) -> Tree:
        add_loras(self._base, self._layers, LoraOptions())
        tree: Tree = self._base.trainable_parameters()
        return tree

    def _logprobs(self, tokens: Sequence[int]) -> np.ndarray:
        logits = self._base(mx.array([tokens]))[0]
        return np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True))

    def _answer(self, request: SamplePrompt, random: np.random.Generator) -> SampledAnswer:
        ends = (END,) if request.stop_ids is None else request.stop_ids
        tokens: list[int] = []
        rows = []
        reason = "length"
        while len(tokens) < request.max_tokens:
            row = self._logprobs([*request.tokens, *tokens])[-1]
            token = int(row.argmax())
            if request.temperature > 0:
                chances = np.exp(row.astype(np.float64) / request.temperature)
                token = int(random.choice(VOCABULARY, p=chances / chances.sum()))
            tokens.append(token)
            rows.append(row)
            text = "".join(map(chr, tokens))
            if token in ends or any(text.endswith(each) for each in request.stop_strings):
                reason = "stop"
                break
        known = np.array(rows)
        logprobs = known[np.arange(len(tokens)), tokens].astype(np.float32)
        top = top_of(known, request.top_logprobs) if request.top_logprobs else None
        return SampledAnswer(np.array(tokens, np.int32), logprobs, reason, top)


def top_of(known: np.ndarray, count: int) -> TopTokens:
    """Return the likeliest tokens at each place."""
    ids = np.argsort(-known, axis=-1)[:, :count]
    return TopTokens(ids.astype(np.int32), np.take_along_axis(known, ids, -1).astype(np.float32))
