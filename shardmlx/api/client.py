"""A training loop in a program of its own, under mpirun: the service's requests as plain calls."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing, contextmanager
from typing import Any, Generic, TypeVar

import numpy as np
from mlx_lm.tokenizer_utils import TokenizerWrapper

from shardmlx.api.requests import (
    CreateModel,
    DeleteState,
    DropSnapshot,
    ForwardBackward,
    LoadState,
    LoraOptions,
    LossResult,
    LossRow,
    OptimStep,
    Request,
    SamplePrompt,
    SampleResult,
    SavedState,
    SaveState,
    TakeSnapshot,
    UnloadModel,
)
from shardmlx.api.service import TrainService
from shardmlx.api.setup import prepare, serve_loop
from shardmlx.api.worker import LoopWorker
from shardmlx.common.reporter import Reporter
from shardmlx.config.loop import LoopConfig
from shardmlx.distributed.crew import leading
from shardmlx.distributed.transport import Transport
from shardmlx.loading.tokenizer import read_tokenizer

T = TypeVar("T")


class Call(Generic[T]):
    """A call under way. Calls of a model are carried out in their order; an update begins right
    behind the gradients that it needs, if it was called before their result was asked for."""

    def __init__(self, service: TrainService, future: Future[Any]) -> None:
        self._service = service
        self._future = future

    def result(self) -> T:
        """Carry out calls until this one is done; return its result. Raises ``UserError`` if the
        call was wrong."""
        result: T = self._service.finish(self._future)
        return result


class TrainClient:
    """The four calls of a training loop, on rank 0. Arrays are NumPy's, or lists of numbers."""

    def __init__(self, service: TrainService, tokenizer: TokenizerWrapper) -> None:
        self.service = service
        self.tokenizer = tokenizer
        self._count = 0

    def create_model(
        self,
        *,
        rank: int = 32,
        seed: int = 0,
        attention: bool = True,
        mlp: bool = True,
        unembed: bool = True,
    ) -> TrainedModel:
        """Make a model that trains: a new LoRA on the base."""
        lora = LoraOptions(rank, seed, attention, mlp, unembed)
        return self._create(lambda name: CreateModel(name, lora))

    def load_model(self, state: str, *, with_optimizer: bool = True) -> TrainedModel:
        """Make a model of a saved state."""
        return self._create(
            lambda name: CreateModel(name, state=state, with_optimizer=with_optimizer)
        )

    def sample(
        self, prompt: Sequence[int] | str, snapshot: str | None = None, **how: Any
    ) -> Call[SampleResult]:
        """Generate answers to a prompt by a snapshot, or by the base; ``how`` are further fields of
        ``SamplePrompt``, such as ``count`` and ``max_tokens``."""
        tokens = self.tokenizer.encode(prompt) if isinstance(prompt, str) else [*prompt]
        return self._call(SamplePrompt(tokens, snapshot, **how))

    def drop_snapshot(self, snapshot: str) -> None:
        """Forget a snapshot."""
        self._call(DropSnapshot(snapshot)).result()

    def states(self) -> Sequence[SavedState]:
        """Return all saved states, the oldest first."""
        return self.service.states()

    def delete_state(self, state: str) -> None:
        """Delete a saved state."""
        self._call(DeleteState(state)).result()

    def export(self, state: str) -> bytes:
        """Return a tar archive of a saved state's adapter, as mlx_lm loads it."""
        return self.service.export(state)

    def _create(self, request: Any) -> TrainedModel:
        self._count += 1
        name: str = self._call(request(f"model-{self._count}")).result()
        return TrainedModel(self, name)

    def _call(self, request: Request) -> Call[Any]:
        return Call(self.service, self.service.submit(request))


class TrainedModel:
    """A model that trains: a LoRA on the base of a ``TrainClient``."""

    def __init__(self, client: TrainClient, name: str) -> None:
        self.name = name
        self._client = client
        self._snapshots = 0

    def forward_backward(
        self,
        rows: Sequence[Mapping[str, Any]],
        loss: str = "cross_entropy",
        settings: Mapping[str, float] | None = None,
        *,
        forward_only: bool = False,
    ) -> Call[LossResult]:
        """Compute a loss, summed over the tokens of rows, and add its gradients to the model's; or
        with ``forward_only`` the loss alone. A row has its ``tokens``, ``target_tokens``, and what
        the ``loss`` needs beside them."""
        made = [
            LossRow(
                np.asarray(row["tokens"], np.int32),
                {name: _array(name, value) for name, value in row.items() if name != "tokens"},
            )
            for row in rows
        ]
        return self._call(ForwardBackward(self.name, made, loss, settings or {}, forward_only))

    def optim_step(self, learning_rate: float = 1e-4, **how: float) -> Call[Mapping[str, float]]:
        """Update the model by AdamW with the gradients so far; ``how`` are further fields of
        ``OptimStep``, such as ``weight_decay`` and ``grad_clip_norm``."""
        return self._call(OptimStep(self.name, learning_rate, **how))

    def snapshot(self) -> str:
        """Keep the weights of now in memory, to sample from; return the snapshot's name."""
        self._snapshots += 1
        name = f"{self.name}/{self._snapshots}"
        self._call(TakeSnapshot(name, self.name)).result()
        return name

    def save(self, state: str, *, overwrite: bool = False) -> SavedState:
        """Save the model with its optimizer's state."""
        saved: SavedState = self._call(SaveState(self.name, state, overwrite)).result()
        return saved

    def load(self, state: str, *, with_optimizer: bool = True) -> None:
        """Go on from a saved state of a LoRA like this one."""
        self._call(LoadState(self.name, state, with_optimizer)).result()

    def unload(self) -> None:
        """Forget the model. Its saved states stay."""
        self._call(UnloadModel(self.name)).result()

    def _call(self, request: Request) -> Call[Any]:
        return self._client._call(request)


@contextmanager
def train_client(
    transport: Transport, *, quiet: bool = False, **options: Any
) -> Iterator[TrainClient | None]:
    """Give rank 0 a client for a block, with a model that all ranks have loaded; the other ranks
    carry out its calls until its block ends, and are given None for theirs.

    ``options`` are those of ``LoopConfig``, by their flat names; rank 0's count. Raises
    ``UserError`` for what the user can fix.
    """
    config = LoopConfig.from_flat(**options)
    worker = LoopWorker(transport, Reporter(quiet=quiet or transport.rank != 0))
    with closing(worker), leading(transport, worker) as crew:
        if crew is None:
            yield None
            return
        prepare(config.spec, crew)
        tokenizer = read_tokenizer(worker.opened.path, False, worker.opened.config)
        service = serve_loop(config.spec, crew, tokenizer)
        try:
            yield TrainClient(service, tokenizer)
        finally:
            service.end()


def _array(name: str, value: Any) -> np.ndarray:
    return np.asarray(value, np.int64 if name == "target_tokens" else np.float32)
