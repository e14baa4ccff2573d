"""Islands and their hub: losses, and how long they wait on slow links."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.bench.benchmark import Bench, Benchmark, as_flags, environment, program, run
from scripts.bench.between_hosts import train_on
from scripts.bench.trained import (
    FULL,
    PIRATE,
    demo_lacks,
    demo_model,
    make_long_rows,
    make_wide,
    of_kind,
    of_width,
)
from shardmlx.islands.client import TOKEN
from shardmlx.islands.encodings import encoding_named
from shardmlx.islands.store import Run
from testbed.delays import SlowLink
from testbed.delays import command as delay_command
from testbed.hosts import Lab, hosts, missing
from testbed.hub_process import started_hub
from testbed.rows import write

TRAIN = ("-m", "shardmlx", "train")

TOGETHER = "data parallel"


@contextmanager
def running_hub(path: Path, names: Sequence[str], **terms: object) -> Iterator[int]:
    """Run a hub for islands with these names, and yield its port."""
    hub, port = started_hub(path, names, *as_flags(terms), env=environment())
    try:
        yield port
    finally:
        hub.terminate()
        hub.wait()


def train_islands(
    hub: Path,
    ports: dict[str, int],
    flags: dict[str, dict[str, object]],
    program: Sequence[object] = TRAIN,
) -> None:
    """Train islands, each with flags of its own, by a hub's ports. SystemExit if one fails."""
    islands = []
    for name, own in flags.items():
        address = {"island": f"http://127.0.0.1:{ports[name]}", "name": name}
        command = [sys.executable, *map(str, program), *as_flags({**own, **address})]
        token = {TOKEN: (hub / "tokens" / name).read_text()}
        islands.append(subprocess.Popen(command, env={**os.environ, **environment(), **token}))
    if any(status != 0 for status in [island.wait() for island in islands]):
        raise SystemExit("an island failed")


# Losses

ENCODINGS = ("float32", "int8", "top-k:0.1")
POINTS = 3
"""Points of a curve, evenly spaced, the last at the end of the run."""
NAMES = ("ann", "bob", "cem", "dia")
LENGTH = 32
TEXTS = 40
"""Texts of the validation set that losses are means of."""

LEARNING_RATE = 1e-5

TRAINING = {
    **FULL, "optimizer": "adam", "learning_rate": LEARNING_RATE, "max_seq_length": LENGTH + 1,
    "no_pack": True,
}  # fmt: skip


@dataclass(frozen=True)
class Course:
    """The steps of a run: ``warm_up`` before it, then ``rounds`` of ``steps`` between reports."""

    warm_up: int
    steps: int
    rounds: int

    @property
    def points(self) -> list[int]:
        """Return the rounds after which losses are taken."""
        every = -(-self.rounds // POINTS)
        return [*range(every, self.rounds, every), self.rounds]

    def decayed(self, directory: Path) -> dict[str, object]:
        """Return the options of a run whose learning rate falls to 0 with its last step."""
        steps = self.rounds * self.steps
        path = directory / "cosine.yaml"
        schedule = {"name": "cosine_decay", "arguments": [LEARNING_RATE, steps]}
        path.write_text(json.dumps({"lr_schedule": schedule}))
        return {"iters": steps, "config": path}


def words(command: str, **flags: object) -> list[str]:
    return [sys.executable, "-m", "shardmlx", command, *as_flags(flags)]


def write_data(directory: Path) -> None:
    """Write the data of all, and of each island: every fourth row, without a chat template."""
    texts = {}
    for split in ("train", "valid"):
        rows = map(json.loads, (PIRATE / f"{split}.jsonl").read_text().splitlines())
        told = [" ".join(turn["content"] for turn in row["messages"]) for row in rows]
        texts[split] = [{"text": text} for text in told]
    parts = {TOGETHER: slice(None)}
    parts |= {name: slice(i, None, len(NAMES)) for i, name in enumerate(NAMES)}
    for name, own in parts.items():
        valid = texts["valid"]
        write(directory / name, train=texts["train"][own], valid=valid, test=valid)


def loss_of(directory: Path, model: Path, **adapters: Path) -> float:
    """Return the loss of a model, with the weights that a hub wrote or without."""
    output = directory / "loss.json"
    limits = {"max_seq_length": LENGTH + 1, "limit": TEXTS, "output": output}
    run(words("evaluate", data=directory / TOGETHER, model=model, **limits, **adapters))
    return float(json.loads(output.read_text())["loss"])


def keep(hub: Path, rounds: Iterable[int], copies: Path) -> None:
    """Copy a hub's directory as it is after each of these rounds, while it runs."""
    for number in rounds:
        version = hub / "fragment-000" / f"v{number:07}"
        while not version.exists():
            time.sleep(0.5)
        copy = copies / f"hub-{number}"
        shutil.copytree(version, copy / "fragment-000" / version.name)
        shutil.copytree(hub / "tokens", copy / "tokens")
        shutil.copy(hub / "run.json", copy)


def train_apart(
    model: Path, encoding: str, own: Path, directory: Path, course: Course
) -> list[Path]:
    """Train islands to the end of the run, and return what the hub has at the points."""
    path, flags = own / "hub", {**TRAINING, **course.decayed(directory), "model": model}
    islands: dict[str, dict[str, object]] = {
        name: {**flags, "batch_size": 1, "data": directory / name, "adapter_path": path / name}
        for name in NAMES
    }
    terms = {"encoding": encoding, "inner_steps": course.steps, "rounds": course.rounds}
    with running_hub(path, NAMES, **terms) as port, ThreadPoolExecutor(1) as pool:
        kept = pool.submit(keep, path, course.points, own)
        train_islands(path, dict.fromkeys(NAMES, port), islands)
        kept.result()
    outs = [own / f"out-{number}" for number in course.points]
    for number, out in zip(course.points, outs, strict=True):
        run(words("hub", path=own / f"hub-{number}", write=out))
    return outs


def train_together(model: Path, out: Path, directory: Path, **own: object) -> None:
    """Train in one process."""
    flags = {**TRAINING, "model": model, "batch_size": len(NAMES), **own}
    run(words("train", **flags, data=directory / TOGETHER, adapter_path=out))


def train_in_parts(model: Path, own: Path, directory: Path, course: Course) -> list[Path]:
    """Train in one process that stops at each point and goes on; return what it has there."""
    flags, outs = course.decayed(directory) | {"checkpoint_dir": own / "checkpoints"}, []
    for number in course.points:
        outs.append(own / f"out-{number}")
        flags |= {"iters": number * course.steps}
        train_together(model, outs[-1], directory, **flags)
    return outs


def islands(bench: Bench) -> None:
    """Losses of SmolLM2's full fine-tune: data parallel, and four islands in 3 encodings.

    Data parallel is one process with batches of four rows of 32 tokens; each island has a quarter
    of the same rows, a process and a row a step, and reports every 20 steps. All begin with the
    model that 60 steps of data parallel made, since islands go on from trained weights (DiLoCo,
    arXiv:2311.08105). All weights but the embedding are trained with Adam, whose learning rate
    falls from 1e-5 to 0 by a cosine, as in that paper. Losses are those of the validation set, and
    for islands of the hub's outer weights. Nothing is timed, so it does not matter what else the
    machine does. A round is one of the hub's. Two hours of CPU time, 12 GB of memory, 8 GB of disk.
    """
    given = bench.options
    # Islands that are ahead do not end before the others have joined.
    course = Course(1, 100, 2) if bench.quick else Course(given.warm_up, given.steps, bench.rounds)
    directory = bench.directory
    write_data(directory)
    model, losses = directory / "model", dict[str, list[float]]()
    train_together(demo_model(bench), model, directory, iters=course.warm_up, seed=1)
    bench.say("before", f"{loss_of(directory, model):.4f}")
    for name in filter(bench.wants, (TOGETHER, *ENCODINGS)):
        with tempfile.TemporaryDirectory(dir=directory) as made:
            if name == TOGETHER:
                outs = train_in_parts(model, Path(made), directory, course)
                losses[name] = [loss_of(directory, out) for out in outs]
            else:
                outs = train_apart(model, name, Path(made), directory, course)
                losses[name] = [loss_of(directory, model, adapter_path=out) for out in outs]
        bench.say(name, *(f"{loss:.4f}" for loss in losses[name]))
    bench.keep(losses=losses)
    base = losses.get(TOGETHER)
    lines = [
        (
            name,
            *(f"{loss:.3f}" for loss in each),
            f"{100 * (each[-1] / base[-1] - 1):+.2f}%" if base else "",
        )
        for name, each in losses.items()
    ]
    after = (f"after {number * course.steps}" for number in course.points)
    bench.show("SmolLM2-135M, full", ("validation", *after, "beside data parallel"), lines)


def add_islands(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--warm-up", type=int, default=60, help="steps before all runs")
    parser.add_argument("--steps", type=int, default=20, help="steps between two reports")


# Slow links

RATE, DELAY = 20e6 / 8, 0.05
PAIR = ("ann", "bob")

SHORT = {
    **FULL, "optimizer": "adam", "batch_size": 1, "max_seq_length": 33, "recompute": "none",
}  # fmt: skip


@dataclass(frozen=True)
class Kind:
    """A run: what the hub asks of islands, beside ``inner_steps``; and how many rounds it has."""

    terms: dict[str, object]
    rounds: int = 2
    every: int | None = None
    overlaps: bool = False
    """True where an island trains on for two fifths of the steps between reports meanwhile."""


KINDS = {
    "each step": Kind({"outer_optimizer": "sgd"}, rounds=8, every=1),
    "each 100 steps": Kind({}),
    "the same, 4 fragments, --overlap 40": Kind({"fragments": 4}, overlaps=True),
    "the same, --encoding int8": Kind({"fragments": 4, "encoding": "int8"}, overlaps=True),
}

MOST_TOGETHER = 8
SENT = "/sys/class/net/eth0/statistics/tx_bytes"


def measure(kind: Kind, steps: int, model: Path, data: Path) -> dict[str, Any]:
    """Return the clock of each island, the bytes of its link, and those that were planned."""
    every = kind.every or steps
    # What is reported last arrives before the last step.
    overlap = 2 * every // 5 if kind.overlaps else 0
    iters = 1 + kind.rounds * every + overlap
    terms = {"inner_steps": every, "overlap": overlap, **kind.terms}
    with tempfile.TemporaryDirectory() as made:
        path = Path(made, "hub")
        flags: dict[str, dict[str, object]] = {
            name: {
                **SHORT, "model": model, "data": data, "iters": iters,
                "adapter_path": Path(made, name),
            }
            for name in PAIR
        }  # fmt: skip
        with running_hub(path, PAIR, **terms) as port:
            links = {name: SlowLink(port, RATE, DELAY) for name in PAIR}
            ports = {name: link.port for name, link in links.items()}
            train_islands(path, ports, flags, program("island_ranks"))
        with closing(Run(path, [], None)) as run:
            planned = planned_bytes(run, iters)
        return {
            "clocks": [json.loads(Path(made, name, "clock.json").read_text()) for name in PAIR],
            "bytes": sum(sum(link.bytes.values()) for link in links.values()),
            "planned_bytes": planned,
        }


def measure_together(bench: Bench, steps: int, model: Path, data: Path) -> dict[str, Any]:
    """Return the clock of each replica, and the bytes of the link between them."""
    rate = f"{8 * RATE / 1e6:g}mbit"
    line = delay_command("line", DELAY)
    with tempfile.TemporaryDirectory() as made, hosts(Path(made), 2, rate=rate, line=line) as lab:
        flags = {
            **SHORT, "model": model, "data": data, "batch_size": 2, "pipeline_stages": 1, "zero": 0,
            "iters": 1 + min(steps, MOST_TOGETHER),
        }  # fmt: skip
        before = sent_bytes(lab)
        told = train_on(bench, lab, "together", flags)
        sent = sent_bytes(lab) - before
    made_steps = of_kind(told, "train")[1:]
    seconds = sum(each["step_seconds"] for each in made_steps)
    clocks = []
    for rank in range(2):
        waited = sum(each["ranks"][rank]["exposed_comm_seconds"] for each in made_steps)
        of_rank = {"seconds": seconds, "waited": waited, "worked": 0.0, "steps": len(made_steps)}
        clocks.append(of_rank)
    return {"clocks": clocks, "bytes": sent}


def sent_bytes(lab: Lab) -> int:
    """Return the bytes that all hosts have sent, with headers."""
    counters = (lab.command(host, "cat", SENT) for host in lab.hosts)
    return sum(int(subprocess.check_output(each)) for each in counters)


def planned_bytes(run: Run, steps: int) -> int:
    """Return the bytes of the weights that the first island gives and the others take, of all
    reports, and of what comes back."""
    total = 0
    for k, each in enumerate(run.fragments):
        whole, report = each.seed_bytes, each.report_bytes
        is_lossy = encoding_named(run.terms.encoding).is_lossy
        reports = sum(k in run.terms.due(step) for step in range(1, steps + 1))
        back = report if is_lossy else whole
        total += len(PAIR) * (whole + reports * (report + back))
    return total


def cells(name: str, found: dict[str, Any]) -> tuple[str, ...]:
    """Return a line of the table, of the island that waited most."""
    clock = max(found["clocks"], key=waits)
    own, planned = clock["seconds"] - clock["waited"] - clock["worked"], found.get("planned_bytes")
    return (
        name,
        f"{own / clock['steps']:.2f} s",
        f"{100 * waits(clock):.1f}%",
        f"{100 * clock['worked'] / clock['seconds']:.1f}%",
        f"{100 * own / clock['seconds']:.1f}%",
        f"{found['bytes'] / 1e6:.1f} MB",
        f"{100 * (found['bytes'] / planned - 1):+.1f}%" if planned else "",
    )


def waits(clock: dict[str, float]) -> float:
    """Return the part of its time for which an island waited."""
    return clock["waited"] / clock["seconds"]


def island_links(bench: Bench) -> None:
    """How long islands wait for a hub behind links of 20 Mbit/s and 50 ms, and what goes over them;
    and how long two replicas wait for each other.

    Two islands, a process each, train all of an 8-layer, 128-wide model, 1.7M weights, a row of 32
    tokens; each has a link of its own. A step whose sums or reports cross such a link each time
    waits for them; an island that reports every 100 steps waits less, and not at all if it trains
    on meanwhile. Shares are of an island's own time after its first step. The planned bytes are
    those of all reports and all weights, by the protocol.

    Data parallel is one job, a row a replica: its hosts are network namespaces (root, Linux) with
    such a link between them, and its bytes what they send, headers too. It is beside islands that
    report each step. Six minutes on two cores.
    """
    steps = 5 if bench.quick else bench.options.steps
    model = make_wide(bench.directory / "model", **of_width(128))
    data = make_long_rows(bench.directory / "data")
    results, lines = [], []
    lacks = missing()
    if lacks:
        bench.say(f"no {TOGETHER}: {lacks}")
    elif bench.wants(TOGETHER):
        results.append({"kind": TOGETHER, **measure_together(bench, steps, model, data)})
    for name, kind in bench.chosen(KINDS).items():
        results.append({"kind": name, **measure(kind, steps, model, data)})
        bench.say(results[-1])
    bench.keep(links=results)
    lines = [cells(found["kind"], found) for found in results]
    header = ("reports", "a step computes", "it waits", "encodes, merges", "computes", "bytes")
    bench.show("Two islands, or replicas", (*header, "beside the plan"), lines)


def add_island_links(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=100, help="steps between two reports")


ISLANDS = Benchmark("islands", islands, add_islands, rounds=12, needs=[demo_lacks])
ISLAND_LINKS = Benchmark("island-links", island_links, add_island_links, needs=[demo_lacks])
