#!/usr/bin/env python3
"""Kill clients and ranks of a server of training loops at random, and compare every loss.

    python scripts/soak_loops.py --kills 100 --seed 1

``launch serve --train`` has a small model on two ranks, and clients with Tinker's SDK train a LoRA
each, in processes of their own. Each saves its state now and then, and goes on from the last one
that the server has acknowledged. A kill takes a client, a rank, or rank 0 right after it has
acknowledged a state. Every loss must be that of an undisturbed client, to the bit, also where only
others were killed. No acknowledged state may be lost, and no client may hang. Linux only.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import random
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import tinker
from _soaking import Record, parser_of, small_model
from tinker import types

from testbed.jobs import Running

RANKS = 2
CLIENTS = 2
STEPS = 9
STEPS_A_STATE = 2
KILLS_A_START = 3
"""Kills of ranks after which launch is started anew: it waits longer before each restart."""

KEY = "tml-a-key"
SECONDS = 180.0
"""Time after which a client that makes no step hangs."""

SERVER_FAILED = 3
"""Status of a client whose requests failed by no fault of its."""

KINDS = ("a client", "a rank", "rank 0 after a save")


def rows_of(seed: int, step: int) -> list[types.Datum]:
    """Return the rows of a step of the client with a seed."""
    numbers = np.random.default_rng((seed, step))
    rows = []
    for length in (7, 12, 9):
        tokens = [int(each) for each in numbers.integers(10, 90, length)]
        given: dict[str, Any] = {
            "target_tokens": np.array(tokens[1:]),
            "weights": np.ones(length - 1, np.float32),
        }
        text = types.ModelInput.from_ints(tokens[:-1])
        rows.append(types.Datum(model_input=text, loss_fn_inputs=given))
    return rows


def read_log(log: Path) -> list[dict[str, Any]]:
    """Return the lines that a client has written; a kill may have cut the last one."""
    found = []
    for line in log.read_text().splitlines() if log.exists() else []:
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def train(url: str, name: str, seed: int, log: Path) -> None:
    """Train to the end, from the last acknowledged state on. The process of a client."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        _train(url, name, seed, log)
    except tinker.RequestFailedError as error:
        if error.category is types.RequestErrorCategory.User:
            traceback.print_exc()
            os._exit(1)
        os._exit(SERVER_FAILED)
    except (tinker.APIConnectionError, tinker.APIStatusError, tinker.APITimeoutError) as error:
        missing = isinstance(error, tinker.NotFoundError)
        if missing:
            traceback.print_exc()
        os._exit(1 if missing else SERVER_FAILED)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def _train(url: str, name: str, seed: int, log: Path) -> None:
    saved = [line for line in read_log(log) if "path" in line]
    client = tinker.ServiceClient(base_url=url, api_key=KEY)
    step = 0
    if saved:
        step = saved[-1]["step"]
        path = saved[-1]["path"]
        model = client.create_training_client_from_state_with_optimizer(path).result()
    else:
        model = client.create_lora_training_client("small", rank=4, seed=seed).result()
    sampler = client.create_sampling_client(base_model="small").result()
    with log.open("a") as file:
        if file.tell():
            file.write("\n")  # what a kill has cut ends here

        def write(**line: Any) -> None:
            file.write(json.dumps(line) + "\n")
            file.flush()

        while step < STEPS:
            loss = model.forward_backward(rows_of(seed, step), "cross_entropy")
            update = model.optim_step(types.AdamParams(learning_rate=1e-2))
            found = loss.result().metrics["loss:sum"]
            update.result()
            step += 1
            write(step=step, loss=found)
            prompt = types.ModelInput.from_ints([10, 11, 12 + step])
            sampler.sample(prompt, 2, types.SamplingParams(max_tokens=8)).result()
            if step % STEPS_A_STATE == 0:
                # A state that was saved and not acknowledged may be there already.
                state = model.save_state(f"{name}-{step}", overwrite=True).result()
                write(step=step, path=state.path)
    client.close("success").result()


@dataclass
class Loop:
    """A client that trains, in one process after the other."""

    name: str
    seed: int
    url: str
    log: Path
    process: BaseProcess | None = None
    heard: float = field(default_factory=time.monotonic)
    lines: int = 0

    def start(self) -> None:
        """Start its next process."""
        context = multiprocessing.get_context("forkserver")
        args = (self.url, self.name, self.seed, self.log)
        process = context.Process(target=train, args=args, daemon=True)
        process.start()
        self.process = process
        self.heard = time.monotonic()

    def kill(self) -> None:
        """End its process at once."""
        if self.process is not None:
            self.process.kill()
            self.process.join()

    @property
    def found(self) -> list[dict[str, Any]]:
        """What it has written so far."""
        return read_log(self.log)

    @property
    def states(self) -> list[str]:
        """The states that the server has acknowledged."""
        return [line["path"] for line in self.found if "path" in line]

    def look(self, record: Record) -> bool:
        """Start its process again if that has ended too early; return whether it is done."""
        lines = len(self.found)
        if lines > self.lines:
            self.lines = lines
            self.heard = time.monotonic()
        assert self.process is not None, "it was started"
        status = self.process.exitcode
        if status is None and time.monotonic() - self.heard > SECONDS:
            record.fault(f"{self.name} hangs after {self.found[-1:]}")
            self.kill()
            self.start()
        if status == 0:
            return True
        if status is not None:
            if status == SERVER_FAILED:
                record.counts["failures that a client was told of"] += 1
                time.sleep(0.5)
            elif status != -signal.SIGKILL:
                record.fault(f"{self.name} ended with {status} after {self.found[-1:]}")
            self.start()
        return False


@dataclass
class Soak:
    """Clients, the server that they train at, and what has happened."""

    model: Path
    root: Path
    record: Record
    random: random.Random
    curves: dict[int, dict[int, float]] = field(default_factory=dict)
    loops: list[Loop] = field(default_factory=list)
    done: list[Loop] = field(default_factory=list)
    states: set[str] = field(default_factory=set)
    kills: int = 0

    def server(self) -> Running:
        """Start a server with the states of those before it."""
        launch = [sys.executable, "-m", "shardmlx", "launch", "-n", str(RANKS)]
        launch += ["--max-restarts", "9", "serve", "--model", str(self.model), "--train"]
        launch += ["--port", self.port, "--api-key", KEY, "--timeout", "20"]
        launch += ["--served-model-name", "small", "--state-dir", str(self.root / "states")]
        launch += ["--max-train-length", "64", "--max-lora-rank", "4", "--cache-tokens", "2048"]
        launch += ["--max-adapters", "8"]  # those of killed clients stay for half a minute
        return Running(launch)

    def __post_init__(self) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = str(free.getsockname()[1])

    def until(self, condition: Any, what: str) -> bool:
        """Look after the clients until something is so; a fault if it is never."""
        end = time.monotonic() + SECONDS
        while not condition():
            self.tend()
            if time.monotonic() > end:
                self.record.fault(f"it does not happen: {what}")
                return False
            time.sleep(0.02)
        return True

    def tend(self) -> None:
        """Start what has ended, check what is done, and have as many clients as there should be."""
        for loop in list(self.loops):
            if loop.look(self.record):
                self.loops.remove(loop)
                self.check(loop)
                self.add(loop.seed)

    def add(self, seed: int) -> Loop:
        """Begin a client."""
        number = len(self.done) + len(self.loops)
        name = f"client-{seed}-{number}-{self.random.randrange(10**6)}"
        loop = Loop(name, seed, f"http://127.0.0.1:{self.port}", self.root / f"{name}.jsonl")
        loop.start()
        self.loops.append(loop)
        return loop

    def check(self, loop: Loop) -> None:
        """Compare the losses of a client that is done, or given up, with the undisturbed ones."""
        self.done.append(loop)
        self.states.update(loop.states)
        known = self.curves.setdefault(loop.seed, {})
        for line in loop.found:
            if "loss" in line:
                step = line["step"]
                if line["loss"] != known.setdefault(step, line["loss"]):
                    self.record.fault(
                        f"{loop.name}, step {step}: {line['loss']}, not {known[step]}"
                    )
                self.record.counts["losses compared"] += 1
        self.record.counts["curves to the end"] += loop.process is not None and (
            loop.process.exitcode == 0
        )

    def strike(self, server: Running, kind: str) -> None:
        """Kill something of a kind, and wait until the clients go on."""
        steps = sum(len(loop.found) for loop in self.loops) + sum(
            len(loop.found) for loop in self.done
        )
        victim = self.random.choice(self.loops)
        if kind == "a client":
            time.sleep(self.random.uniform(0.0, 1.0))
            victim.kill()
        elif kind == "a rank":
            time.sleep(self.random.uniform(0.0, 1.0))
            self.kill_rank(server, self.random.randrange(RANKS))
        else:
            before = self.acknowledged()
            if not self.until(lambda: self.acknowledged() > before, "a state is saved"):
                return
            self.kill_rank(server, 0)
        self.kills += 1
        self.record.counts[f"kills: {kind}"] += 1
        self.until(
            lambda: sum(len(loop.found) for loop in [*self.loops, *self.done]) > steps + 1,
            f"steps after the kill of {kind}",
        )
        print(self.kills, kind, flush=True)

    def acknowledged(self) -> int:
        """Return the number of states that were acknowledged so far."""
        return sum(len(loop.states) for loop in [*self.loops, *self.done])

    def kill_rank(self, server: Running, rank: int) -> None:
        """Kill a rank, once it is there."""
        server.until(lambda: server.pid_of(rank) is not None)
        server.kill_rank(rank, signal.SIGKILL)

    def undisturbed(self) -> None:
        """Have a client of each seed train alone."""
        with self.server():
            for seed in range(CLIENTS):
                loop = self.add(seed)
                while not loop.look(self.record):
                    time.sleep(0.02)
                self.loops.remove(loop)
                self.check(loop)

    def run(self, kills: int, seconds: float) -> None:
        """Kill so often, or until so much time is over."""
        end = time.monotonic() + seconds
        while self.kills < kills and time.monotonic() < end:
            of_ranks = 0
            with self.server() as server:
                if not self.loops:
                    for seed in range(CLIENTS):
                        self.add(seed)
                while of_ranks < KILLS_A_START and self.kills < kills and time.monotonic() < end:
                    kind = self.random.choice(KINDS)
                    of_ranks += kind != KINDS[0]
                    self.strike(server, kind)
                    if self.record.faults:
                        print(server.job().output[-4000:], file=sys.stderr)
                        return

    def find_states(self) -> None:
        """Ask a server of its own for every state that was acknowledged."""
        for loop in self.loops:
            loop.kill()
            self.check(loop)
        with self.server():
            end = time.monotonic() + SECONDS
            while True:
                try:
                    client = tinker.ServiceClient(
                        base_url=f"http://127.0.0.1:{self.port}", api_key=KEY
                    )
                    rest = client.create_rest_client()
                    listed = rest.list_user_checkpoints(limit=10**6).result().checkpoints
                    break
                except tinker.TinkerError:
                    if time.monotonic() > end:
                        raise
            there = {each.tinker_path for each in listed}
        for path in sorted(self.states - there):
            self.record.fault(f"{path} was acknowledged, and is lost")
        self.record.counts["acknowledged states that are there"] = len(self.states & there)


def main(words: Sequence[str] | None = None) -> int:
    """Return 1 if something happened that must not."""
    parser = parser_of(str(__doc__))
    parser.add_argument("--kills", type=int, default=100, help="to make (default: 100)")
    parser.add_argument(
        "--seconds",
        type=float,
        default=math.inf,
        help="kill nothing after so many (default: no end)",
    )
    flags = parser.parse_args(words)
    record = Record()
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        model, _ = small_model(root)
        soak = Soak(model, root, record, random.Random(flags.seed))
        soak.undisturbed()
        soak.run(flags.kills, flags.seconds)
        soak.find_states()
    record.show()
    return 1 if record.faults else 0


if __name__ == "__main__":
    raise SystemExit(main())
