"""Between hosts: sums of gradients, predictions, and replicas of unequal speed.

Hosts are network namespaces of this machine (root, Linux).
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from scripts.bench.benchmark import (
    Bench,
    Benchmark,
    as_flags,
    beside,
    last_json,
    program,
    run,
    run_all,
    verdict,
)
from scripts.bench.stages import add_torch
from scripts.bench.trained import FULL, as_words, demo_lacks, make_both, of_kind
from shardmlx.common.units import MIB
from testbed.cgroups import cpu_cgroups
from testbed.hosts import NETWORK, Lab, hosts, missing
from testbed.runs import events

BITS = {"mbit": 1e6, "gbit": 1e9}

PORT = 5000


def bytes_a_second(rate: str) -> float:
    """Return what a link carries, with the headers, whose rate is in ``tc``'s words."""
    unit = rate.lstrip("0123456789")
    return float(rate.removesuffix(unit)) * BITS[unit] / 8


def train_on(
    bench: Bench, lab: Lab, name: str, flags: Mapping[str, object]
) -> list[dict[str, Any]]:
    """Train on both hosts, a report each step; return the events of the metrics file. A core for
    each host: else the kernel moves processes between those of this machine."""
    files = {"steps_per_report": 1, "metrics_file": f"{name}.jsonl", "adapter_path": name}
    metrics = lab.home(lab.hosts[0]) / f"{name}.jsonl"
    metrics.unlink(missing_ok=True)
    words = as_words({**flags, **files}, bench.path(f"{name}.yaml"))
    run_on_both(lab, "shardmlx.train", *words)
    return events(metrics)


PINNED = ("sh", "-c", 'exec taskset --cpu-list "$OMPI_COMM_WORLD_RANK" "$0" "$@"')


def run_on_both(lab: Lab, module: str, *arguments: object) -> None:
    """Run a command on both hosts."""
    command = lab.mpirun(2, "-m", module, *map(str, arguments))
    place = command.index(sys.executable)
    run([*command[:place], *PINNED, *command[place:]], timeout=500)


# Sums


def sums(bench: Bench) -> None:
    """Sums of gradients between hosts: ours, MPI's Iallreduce, MLX's ring, torch's gloo.

    Links are limited in both directions. One bucket, and eight at a time, as multiples of the
    bandwidth bound 2 (n - 1) / n N / B; and the bytes that leave a host as multiples of
    2 (n - 1) / n N. ``--torch`` is a Python that has torch, not in /tmp. About a quarter of an hour
    on two cores.
    """
    measured = []
    for rate in bench.options.rates:
        nbytes = (8 if rate.endswith("mbit") else 32) << 20  # half a second on the link, or less
        for size in bench.options.sizes:
            with tempfile.TemporaryDirectory() as name, hosts(Path(name), size, rate=rate) as lab:
                for buckets in (1,) if bench.quick else (1, 8):
                    rounds = bench.rounds if buckets == 1 else 1
                    seconds = summed(lab, bench.options.torch, nbytes, buckets, rounds)
                    shared = 2 * (size - 1) / size * buckets * nbytes
                    measured.append(
                        {
                            "rate": rate, "hosts": size, "buckets": buckets, "nbytes": nbytes,
                            "bytes": shared, "bound": shared / bytes_a_second(rate),
                            "seconds": seconds,
                        }
                    )  # fmt: skip
                    bench.say(measured[-1])
    bench.keep(sums=measured)
    ways = list(dict.fromkeys(way for each in measured for way in each["seconds"]))
    header = ("link", "hosts", "buckets", "bound", *(f"{way} x (bytes x)" for way in ways))
    title = "Sums between hosts, as multiples of the bandwidth bound"
    bench.show(title, header, [sum_line(each, ways) for each in measured])


def sum_line(found: Mapping[str, Any], ways: Sequence[str]) -> list[str]:
    """Return a line of the table: seconds and bytes of each way."""
    bound = found["bound"]
    buckets = f"{found['buckets']} x {found['nbytes'] >> 20} MiB"
    line = [found["rate"], str(found["hosts"]), buckets, f"{bound:.2f} s"]
    for way in ways:
        rounds = found["seconds"].get(way)
        if rounds is None:
            line.append("")
            continue
        seconds = statistics.median(seconds for seconds, _ in rounds)
        sent = max(nbytes for _, nbytes in rounds) / found["bytes"]
        line.append(f"{seconds / bound:.2f} ({sent:.2f})")
    return line


def summed(lab: Lab, torch: str | None, nbytes: int, buckets: int, rounds: int) -> dict[str, Any]:
    """Return what each way took: for each round seconds, and the most bytes that a rank sent."""
    size = len(lab.hosts)
    numbers = (nbytes, buckets, rounds)
    results: dict[str, Any] = last_json(
        run(lab.mpirun(size, *program("sum_ranks", "mpi", *numbers)), timeout=400)
    )
    addresses = [f"{NETWORK}.{number}" for number in range(1, size + 1)]
    ring = [[f"{address}:{PORT}"] for address in addresses]
    lab.write_everywhere("ring.json", ring)
    pythons = {"ring": sys.executable}
    if torch is not None:
        pythons["gloo"] = torch
    for way, python in pythons.items():
        commands = []
        for rank, host in enumerate(lab.hosts):
            settings = {
                "MLX_RANK": rank, "MLX_HOSTFILE": "ring.json", "RANK": rank, "WORLD_SIZE": size,
                "MASTER_ADDR": addresses[0], "MASTER_PORT": PORT, "GLOO_SOCKET_IFNAME": "eth0",
            }  # fmt: skip
            given = [f"{name}={value}" for name, value in settings.items()]
            words = program("sum_ranks", way, *numbers)
            commands.append(lab.command(host, "env", *given, python, *words))
        results |= last_json(run_all(commands, timeout=400))
    return results


def add_sums(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rates", nargs="*", default=["100mbit", "1gbit"])
    parser.add_argument("--sizes", nargs="*", type=int, default=[2, 3, 4], help="hosts")
    add_torch(parser)


# Predictions

PAYLOAD = 1448 / 1514
"""Part of a full packet that is not headers of Ethernet, IP and TCP."""

REPLICAS = {"pipeline_stages": 1}
KINDS: dict[str, dict[str, Any]] = {
    "--zero 0": {**REPLICAS, "zero": 0},
    "--zero 1": {**REPLICAS, "zero": 1},
    "--zero 1 --sum-dtype bfloat16": {**REPLICAS, "zero": 1, "sum_dtype": "bfloat16"},
    "--zero 1 --sum-dtype int8": {**REPLICAS, "zero": 1, "sum_dtype": "int8"},
    "--zero 3": {**REPLICAS, "zero": 3},
    "two stages, 1f1b": {"pipeline_stages": 2, "schedule": "1f1b"},
}

LENGTH, ROWS = 128, 2
"""Tokens of a row, and rows of a micro-batch."""

TRAINING = {
    **FULL, "optimizer": "adamw", "batch_size": 8 * ROWS, "micro_batch_size": ROWS,
    "max_seq_length": LENGTH + 1, "recompute": "none", "attention_chunk": "off",
    "loss_chunk": "off",
}  # fmt: skip


def links(bench: Bench) -> None:
    """How far predictions are from what is measured between two hosts: time of a step, and memory.

    Links are limited in both directions. A model of 8 layers and width 512, all of it trained in
    float32 with AdamW, steps of 16 rows of 128 tokens: replicas that divide nothing, the optimizer,
    or the weights, sums in 16 and in 8 bits, and two stages. shardmlx.profile measures on both
    hosts at once; the hostfile has what a link carries beside the headers, as shardmlx.doctor would
    write it. A round is a step. A quarter of an hour on two cores.
    """
    lines, results = [], []
    model, data = make_both(bench)
    for rate in bench.options.rates:
        with profiled(bench, rate, model, data) as (lab, common):
            for kind, own in bench.chosen(KINDS).items():
                more = {"profile": "profile.json", "hostfile": "hosts", "iters": bench.rounds + 1}
                told = train_on(bench, lab, "run", {**common, **TRAINING, **own, **more})
                results.append({"rate": rate, "kind": kind, "events": told})
                lines.append((rate, kind, *prediction_cells(told)))
                bench.say("  ".join(lines[-1]))
    bench.keep(links=results)
    header = ("link", "run", "step predicted", "measured", "error", "peak predicted", "measured")
    bench.show("Two hosts", (*header, "error"), lines)


@contextmanager
def profiled(
    bench: Bench, rate: str, model: Path, data: Path
) -> Iterator[tuple[Lab, dict[str, Any]]]:
    """Yield two hosts with a hostfile and a profile, and the options that name model and data."""
    common = {"data": data}
    with tempfile.TemporaryDirectory() as name, hosts(Path(name), 2, rate=rate) as lab:
        link = f"link={bytes_a_second(rate) * PAYLOAD / 1e6:.2f}MB/s latency=100us"
        lines = "".join(f"{host} slots=1 # {link}\n" for host in lab.hosts)
        (lab.home("mac1") / "hosts").write_text(lines)
        kept = {key: TRAINING[key] for key in TRAINING if key not in ("val_batches", "save_every")}
        lengths = f"{LENGTH // 2},{LENGTH}"
        measured = {**kept, **common, "output": "profile.json", "rows": ROWS, "lengths": lengths}
        words = as_words(measured, bench.path("profile.yaml"))
        run_on_both(lab, "shardmlx.profile", model, *words)
        yield lab, {**common, "model": model}


def prediction_cells(told: list[dict[str, Any]]) -> tuple[str, ...]:
    """Return what a run predicted of itself, and took; whatever disturbs a machine makes a step
    slower, so that the fastest counts."""
    steps, summary = of_kind(told, "train")[1:], told[-1]
    seconds, predicted = min(each["step_seconds"] for each in steps), summary["predicted"]
    peak = max(each["peak_memory_bytes"] for each in summary["ranks"])
    expected = max(predicted["peak_memory_bytes"])
    return (
        f"{predicted['step_seconds']:.2f} s",
        f"{seconds:.2f} s",
        beside(seconds, predicted["step_seconds"]),
        f"{expected / MIB:.0f} MiB",
        f"{peak / MIB:.0f} MiB",
        beside(peak, expected),
    )


def add_links(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rates", nargs="*", default=["100mbit", "200mbit"])


# Unequal replicas

CORES = {"mac1": 1.0, "mac2": 0.5}


def unequal_replicas(bench: Bench) -> None:
    """Two replicas of which one has half a core: rows by speed beside equal rows.

    Each host is in a cgroup with its share of a core. Both are measured by shardmlx profile; then
    the same model is trained with equal rows and with --replica-rows auto, by turns. What can be
    gained is (s1 + s2) / (2 s2), where s1 and s2 are the rows that each computes in a second, as
    the run with equal rows has measured them. Five minutes on two cores.
    """
    model, data = make_both(bench)
    common = {
        **FULL, "model": model, "data": data, "max_seq_length": 33 if bench.quick else 129,
        "batch_size": 12, "micro_batch_size": 1, "pipeline_stages": 1, "optimizer": "sgd",
        "iters": 3 if bench.quick else 6, "no-pack": True, "recompute": "none",
    }  # fmt: skip
    kept = ("fine_tune_type", "num_layers", "max_seq_length", "optimizer")
    found = []
    with (
        cpu_cgroups(CORES) as cgroups,
        tempfile.TemporaryDirectory() as name,
        hosts(Path(name), 2, cgroups=cgroups) as lab,
    ):
        profile = {**{key: common[key] for key in kept}, "output": "profile"}
        run(lab.mpirun(2, "-m", "shardmlx.profile", model, *as_flags(profile)))
        by_speed = {**common, "replica_rows": "auto", "profile": "profile"}
        for _ in range(bench.rounds):
            equal = train_on(bench, lab, "equal", common)
            found.append((equal, train_on(bench, lab, "auto", by_speed)))
    bench.keep(rounds=found)
    shown = [gains(*each) for each in found]
    share = statistics.median(gain / ideal for gain, ideal, _ in shown)
    rows = [[f"{gain:.3f}", f"{ideal:.3f}", f"{gain / ideal:.3f}"] for gain, ideal, _ in shown]
    rows.append(["median", "", f"{share:.3f} ({verdict(share, 0.95)})"])
    apart = max(apart for _, _, apart in shown)
    title = f"One replica at half a core: rows by speed (losses within {apart:.0e})"
    bench.show(title, ("equal rows / by speed", "(s1 + s2) / (2 s2)", "share"), rows)


def gains(equal: list[dict[str, Any]], other: list[dict[str, Any]]) -> tuple[float, float, float]:
    """Return what was gained, what can be, and by how much the losses differ."""
    before, after = of_kind(equal, "train"), of_kind(other, "train")
    fast, slow = (
        statistics.median(each["ranks"][rank]["compute_seconds"] for each in before[1:])
        for rank in (0, 1)
    )
    seconds = [
        statistics.median(each["step_seconds"] for each in steps[1:]) for steps in (before, after)
    ]
    pairs = zip(before, after, strict=True)
    apart = max(abs(a["loss"] - b["loss"]) / a["loss"] for a, b in pairs)
    return seconds[0] / seconds[1], (slow / fast + 1) / 2, apart


SUMS = Benchmark("sums", sums, add_sums, rounds=3, needs=[missing])
LINKS = Benchmark("links", links, add_links, rounds=4, needs=[missing, demo_lacks])
UNEQUAL = Benchmark("unequal-replicas", unequal_replicas, rounds=3, needs=[missing, demo_lacks])
