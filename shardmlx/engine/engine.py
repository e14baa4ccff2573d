"""Run one rank's actions. Only the engine sends, and only through a ``Transport``.

A rank does its lowered actions in order, one after the other. Sends and receives run beside the
computing: a SEND only hands its array over, and a RECV waits for a receive that was posted long
before. The middle rank of three, 1F1B with three micro-batches::

    action    what the rank does                          what is posted then
                                                          receive inputs 0 and 1 (PREPOSTED)
    1RECV_F0  wait for input 0                            receive input 2
    1F0       compute, build the backward graph           receive gradient 0, into its cotangent
    1SEND_F0                                              send output 0
    1RECV_F1  wait for input 1
    1F1       compute, build the backward graph           receive gradient 1, into its cotangent
    1SEND_F1                                              send output 1
    1RECV_B0  wait for gradient 0
    1I0       compute the gradient for input 0
    1SEND_B0                                              send it: the rank below waits for it
    1W0       compute the gradients for the weights
    1RECV_F2  wait for input 2
    ...       (1F2 1SEND_F2 1RECV_B1 1I1 1SEND_B1 1W1 1RECV_B2 1I2 1SEND_B2)
    1W2       compute, bucket after bucket                sum each bucket over the replicas
    end       wait for all sends, then for the sums

So at most ``PREPOSTED`` inputs lie ready, and a gradient needs no buffer of its own. Every wait has
a limit, and its message names rank, host, stage, action and peer.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import mlx.core as mx
import numpy as np

from shardmlx.config.specs import SUM_DTYPES
from shardmlx.distributed.messages import Handle, TransportError, in_a_row, new_buffer
from shardmlx.distributed.mlx_group import losses_named
from shardmlx.distributed.sums import Sums
from shardmlx.distributed.tags import FIRST_ENGINE_TAG
from shardmlx.distributed.transport import Transport
from shardmlx.distributed.wire_formats import WIRE_FORMATS
from shardmlx.engine.batches import MicroBatch
from shardmlx.engine.buffers import PREPOSTED, SUM_BUFFER_BYTES
from shardmlx.engine.divided_weights import DividedWeights, Shards
from shardmlx.engine.gradient_reducer import GradientReducer
from shardmlx.engine.stage import Stage
from shardmlx.engine.trace import Recorder, Span
from shardmlx.errors import EngineError, one_line
from shardmlx.pipeline.actions import Action, Grid, Kind
from shardmlx.pipeline.plan import Plan

MAX_STAGES = 1024
"""Limit of the stages of one pipeline: the tags of micro-batches lie this far apart."""

Results = dict[int, Any]
"""Results of the last stage by micro-batch: its loss, a float; or an array of log-probabilities."""


@dataclass(frozen=True, slots=True)
class Step:
    """A training step of an ``engine``, as in ``Engine.train_step``."""

    engine: Engine
    microbatches: Sequence[MicroBatch]
    scale: float = 1.0
    key: tuple[int, ...] = (0,)
    reduce: bool = True


@dataclass(slots=True)
class _Run:
    """A list of actions in progress: posted receives, messages there, messages under way.

    The actions number the micro-batches of all ``steps`` in a row.
    """

    steps: Sequence[Step]
    train: bool
    to_receive: deque[Action] = field(default_factory=deque)
    posted: dict[Action, tuple[Handle, mx.array]] = field(default_factory=dict)
    arrays: dict[Action, mx.array] = field(default_factory=dict)
    outbox: list[tuple[Action, Handle]] = field(default_factory=list)
    results: Results = field(default_factory=dict)
    _ends: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self._ends = list(accumulate(len(step.microbatches) for step in self.steps))

    @property
    def size(self) -> int:
        """Number of micro-batches of all steps together."""
        return self._ends[-1]

    def step_of(self, action: Action) -> tuple[Step, MicroBatch]:
        """Return the step of an action, and its micro-batch."""
        number, j = self._place(action.microbatch)
        return self.steps[number], self.steps[number].microbatches[j]

    def ends_step(self, action: Action) -> bool:
        """Return whether the action is of the last micro-batch of a step."""
        return action.microbatch + 1 in self._ends

    def results_of_steps(self) -> list[Results]:
        """Return the results of each step, by the numbers of its own micro-batches."""
        found: list[Results] = [{} for _ in self.steps]
        for number, result in self.results.items():
            step, j = self._place(number)
            found[step][j] = result
        return found

    def _place(self, number: int) -> tuple[int, int]:
        """Return the step of a micro-batch, and its number there."""
        step = bisect_right(self._ends, number)
        return step, number - (self._ends[step - 1] if step else 0)


class Engine:
    """The engine of one rank: runs its stages, and sends and receives their messages.

    ``stages`` are this rank's in ``plan``, made by ``build_stages``. With ``divides_optimizer`` a
    replica gets only the gradients of weights that it updates; with ``weights`` it holds only
    those, and its stages are ``GatheredStage``s. Gradients travel as ``sum_dtype``. All ranks must
    build their engine and call its methods alike.
    """

    def __init__(
        self,
        plan: Plan,
        transport: Transport,
        stages: Sequence[Stage],
        recorder: Recorder | None = None,
        *,
        divides_optimizer: bool = False,
        sum_dtype: str = SUM_DTYPES[0],
        weights: DividedWeights | None = None,
    ) -> None:
        self.plan = plan
        self.transport = transport
        self.recorder = recorder or Recorder()
        self.replica, self.pipeline_rank = plan.mesh.coordinates(transport.rank)
        self.stages = {stage.index: stage for stage in stages}
        self._share = plan.mesh.share(transport.rank)
        self._sharing = plan.mesh.sharing(transport.rank)
        replicas = plan.mesh.replicas_of(self.pipeline_rank, self._share)
        tied = any(stage.part.shares(name) for stage in stages for name in stage.names)
        room = SUM_BUFFER_BYTES if len(replicas) > 1 or tied else 4
        sums = Sums(transport, new_buffer((room // 4,), mx.float32), WIRE_FORMATS[sum_dtype])
        if weights is not None:
            weights.connect(sums, self.recorder, transport.name(transport.rank))
        self.shards = Shards(
            transport, replicas, stages, sums, divides=divides_optimizer, weights=weights
        )
        self.reducer = GradientReducer(plan, transport, stages, sums, self.shards)
        transport.barrier("start of the engine")
        self._current: Action | None = None
        self._runs = 0

    def train_step(
        self,
        microbatches: Sequence[MicroBatch],
        *,
        scale: float,
        key: tuple[int, ...] = (0,),
        reduce: bool = True,
    ) -> Results:
        """Run forward and backward of this replica's micro-batches.

        Adds to the gradients of the stages. With ``reduce`` the gradients are then summed over the
        global batch. ``scale`` is 1 / valid tokens of the global batch, ``key`` seeds the masks of
        dropout. Returns, on the rank of the last stage, the summed loss of each micro-batch, or the
        log-probabilities of its answers; nothing elsewhere. Raises ``EngineError`` or
        ``TransportError``, which name rank, stage and action.
        """
        (results,) = self.train_steps([Step(self, microbatches, scale, key, reduce)])
        return results

    def train_steps(self, steps: Sequence[Step]) -> list[Results]:
        """Make steps of several engines that differ only in what they train, this one the first:
        micro-batches of one fill the bubble of another.

        Returns the results of each, as ``train_step``. This engine records all events.
        """
        run = _Run(steps, train=True)
        if run.size:
            self._run_together(self.plan.grid(run.size), run)
        for number, step in enumerate(steps):
            if step.reduce or step.engine.shards.weights is not None:
                reducer = step.engine.reducer
                key_of_sum = (self._runs, -1 - number, self.pipeline_rank)
                with (
                    self.recorder.span(Span.REDUCE, "sum over replicas", key_of_sum),
                    losses_named(self.transport, self._sharing, reducer.doing),
                ):
                    reducer.finish(ends_update=step.reduce)
        return run.results_of_steps()

    def evaluate(self, microbatches: Sequence[MicroBatch]) -> Results:
        """Run forward only, and return the results like ``train_step``."""
        (results,) = self.evaluate_steps([Step(self, microbatches)])
        return results

    def evaluate_steps(self, steps: Sequence[Step]) -> list[Results]:
        """Run forward only, like ``train_steps``."""
        run = _Run(steps, train=False)
        if run.size:
            self._run_together(self.plan.forwards(run.size), run)
        return run.results_of_steps()

    def _run_together(self, grid: Grid, run: _Run) -> None:
        """Run this rank's actions of the steps of several engines."""
        self._runs = max(step.engine._runs for step in run.steps)
        self._run(grid[self.pipeline_rank], run)
        for step in run.steps:
            step.engine._runs = self._runs  # so that no two messages have one name

    def sum_gradients(self) -> None:
        """Sum the gradients of steps that did not reduce, as the last step of an update would:
        zeros where this replica has none. Collective."""
        for stage in self.stages.values():
            for name in stage.names:
                if name not in stage.gradients:
                    stage.gradients[name] = mx.zeros(stage.part[name].shape)
            mx.eval(stage.gradients)
            for part in self.reducer.parts(stage):
                self.reducer.start(stage, part)
        self._runs += 1
        with (
            self.recorder.span(Span.REDUCE, "sum over replicas", (self._runs, -1)),
            losses_named(self.transport, self._sharing, self.reducer.doing),
        ):
            self.reducer.finish()

    def gradient_norm(self, spoiled: bool = False) -> float:
        """Return the global gradient norm after a step that reduced; the same on all ranks.

        The norm is not a number if any rank's part is ``spoiled``.
        """
        with self.recorder.span(Span.REDUCE, "norm", (self._runs, -2)):
            return self.reducer.norm(spoiled)

    def forget_gradients(self) -> None:
        """Drop the gradients of all stages of this rank: no update is made with them. All ranks
        must call it."""
        self.reducer.forget()
        for stage in self.stages.values():
            stage.gradients.clear()

    def _run(self, actions: Sequence[Action], run: _Run) -> None:
        self._runs += 1
        run.to_receive.extend(action for action in actions if action.kind is Kind.RECV_F)
        transport, before = self.transport, str(self.transport.activity)
        try:
            for _ in range(PREPOSTED):
                self._post_input(run)
            for action in actions:
                self._current = action
                transport.activity.begin(f"{before}, {_in_words(action)}")
                transport.activity.check(self._who)
                with losses_named(transport, self._sharing, self._who):
                    self._act(action, run)
            for action, handle in run.outbox:
                self._current = action
                self._wait(action, handle, "sending", "to")
        except TransportError:
            raise
        except Exception as error:
            raise EngineError(
                f"{self._who()}: {type(error).__name__}: {one_line(error)}"
            ) from error
        self._current = None
        transport.activity.begin(before)

    def _act(self, action: Action, run: _Run) -> None:
        match action.kind:
            case Kind.F:
                self._forward(action, run)
            case Kind.I:
                self._backward_input(action, run)
            case Kind.W:
                self._backward_weight(action, run)
            case Kind.SEND_F | Kind.SEND_B:
                self._send(action, run)
            case Kind.RECV_F | Kind.RECV_B:
                self._receive(action, run)

    def _forward(self, action: Action, run: _Run) -> None:
        s, j = action.stage, action.microbatch
        step, microbatch = run.step_of(action)
        stage = step.engine.stages[s]
        x = None if stage.part.is_first else run.arrays.pop(Action(s, Kind.RECV_F, j))
        with self.recorder.span(Span.COMPUTE, str(action)):
            if run.train:
                out = stage.forward(j, microbatch, x, scale=step.scale, key=step.key)
            else:
                out = stage.evaluate(microbatch, x)
        if stage.part.is_last:
            if self._share == 0:  # the others that share the stage would count again
                run.results[j] = out.item() if out.ndim == 0 else np.array(out)
        elif s + 1 in self.stages:
            run.arrays[Action(s + 1, Kind.RECV_F, j)] = out
        else:
            run.arrays[Action(s, Kind.SEND_F, j)] = out
            if run.train and (stage.names or stage.needs_input_gradient):
                gradient = Action(s, Kind.RECV_B, j)
                run.posted[gradient] = self._post(gradient, stage.cotangent(j))

    def _backward_input(self, action: Action, run: _Run) -> None:
        s, j = action.stage, action.microbatch
        engine = run.step_of(action)[0].engine
        stage = engine.stages[s]
        with self.recorder.span(Span.COMPUTE, str(action)):
            if stage.reduces_each:
                for part in stage.backward_in_parts(j):
                    engine.reducer.start(stage, part)
            gradient = stage.backward_input(j)
        if s - 1 in engine.stages:
            engine.stages[s - 1].fill_cotangent(j, gradient)
        else:
            run.arrays[Action(s, Kind.SEND_B, j)] = gradient

    def _backward_weight(self, action: Action, run: _Run) -> None:
        step, j = run.step_of(action)[0], action.microbatch
        stage, reducer = step.engine.stages[action.stage], step.engine.reducer
        reduces = stage.reduces_each or (step.reduce and run.ends_step(action))
        parts = reducer.parts(stage) if reduces else [stage.names]
        with self.recorder.span(Span.COMPUTE, str(action)):
            # Each bucket starts on its way while the next one computes.
            for part in stage.backward_weight_in_parts(j, parts):
                if reduces:
                    reducer.start(stage, part)

    def _send(self, action: Action, run: _Run) -> None:
        array = run.arrays.pop(action)
        run.outbox = [(sent, handle) for sent, handle in run.outbox if not handle.done]
        with self.recorder.span(Span.SEND, str(action), self._message(action)):
            handle = self.transport.send(in_a_row(array), self._peer(action), _tag(action))
        run.outbox.append((action, handle))

    def _receive(self, action: Action, run: _Run) -> None:
        handle, array = run.posted.pop(action)
        with self.recorder.span(Span.RECEIVE, str(action), self._message(action)):
            self._wait(action, handle, "waiting for", "from")
        if action.kind is Kind.RECV_F:
            run.arrays[action] = array
            self._post_input(run)

    def _post_input(self, run: _Run) -> None:
        if run.to_receive:
            action = run.to_receive.popleft()
            part = self.stages[action.stage].part
            shape = *run.step_of(action)[1].shape, part.hidden_size
            run.posted[action] = self._post(action, new_buffer(shape, part.dtype))

    def _post(self, action: Action, array: mx.array) -> tuple[Handle, mx.array]:
        return self.transport.receive(array, self._peer(action), _tag(action)), array

    def _wait(self, action: Action, handle: Handle, does: str, where: str) -> None:
        self.transport.wait(
            handle,
            lambda: (
                f"{self.transport.name(self.transport.rank)}, stage {action.stage}, {does} "
                f"{action.words} {where} {self.transport.name(self._peer(action))} ({action})"
            ),
        )

    def _peer(self, action: Action) -> int:
        placement = self.plan.stage_map.placement
        return self.plan.mesh.rank(self.replica, placement[action.neighbour]) + self._share

    def _message(self, action: Action) -> tuple[int, ...]:
        """Name a message: both ends name it alike, and no other message so."""
        return (self._runs, self.replica, _tag(action))

    def _who(self) -> str:
        me = self.transport.name(self.transport.rank)
        return me if self._current is None else f"{me}, {_in_words(self._current)}"


def _in_words(action: Action) -> str:
    return f"stage {action.stage}, {action.words} ({action})"


def _tag(action: Action) -> int:
    """Return a message's tag, from sending stage, kind and micro-batch: alike on both ends."""
    backward = action.kind in (Kind.SEND_B, Kind.RECV_B)
    receives = action.kind in (Kind.RECV_F, Kind.RECV_B)
    sender = action.stage + (0 if not receives else 1 if backward else -1)
    return FIRST_ENGINE_TAG + 2 * (sender + MAX_STAGES * action.microbatch) + int(backward)
