#!/usr/bin/env python3
"""Measure sums of gradients between hosts: ours, MPI's Iallreduce, MLX's ring, torch's gloo.

    python scripts/bench/sums.py [--rates 100mbit 1gbit] [--sizes 2 3 4] [--torch PYTHON]

Hosts are network namespaces whose links are limited in both directions (root, Linux). One bucket,
and eight at a time, as multiples of the bandwidth bound 2 (n - 1) / n N / B; and the bytes that
leave a host as multiples of 2 (n - 1) / n N. ``--torch`` is a Python that has torch, not in /tmp.

About a quarter of an hour on two cores.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _compare import ROOT, Table, environment, machine, parser_of, publish

sys.path.insert(0, str(ROOT))

from testbed.hosts import NETWORK, Lab, hosts, missing

PROGRAM = ROOT / "scripts/bench/_sums.py"

BITS = {"mbit": 1e6, "gbit": 1e9}

PORT = 5000


@dataclass(frozen=True)
class Work:
    rounds: int = 3
    buckets: Sequence[int] = (1, 8)

    def nbytes(self, rate: str) -> int:
        """Return the bytes of a bucket: half a second on the link, or less."""
        return 8 << 20 if rate.endswith("mbit") else 32 << 20


QUICK = Work(rounds=1, buckets=(1,))


def bytes_a_second(rate: str) -> float:
    unit = rate.lstrip("0123456789")
    return float(rate.removesuffix(unit)) * BITS[unit] / 8


def run(commands: Sequence[Sequence[str]], **more: str) -> dict[str, Any]:
    """Run a program on all hosts at once, and return what the first prints."""
    variables = {**os.environ, **environment(), **more}
    processes = [
        subprocess.Popen(
            command,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for command in commands
    ]
    ends = [process.communicate(timeout=400) for process in processes]
    for process, (out, err) in zip(processes, ends, strict=True):
        if process.returncode:
            raise SystemExit(f"{process.args!r}\n{out}\n{err}")
    results: dict[str, Any] = json.loads(ends[0][0].strip().splitlines()[-1])
    return results


def measure(lab: Lab, torch: str | None, nbytes: int, buckets: int, rounds: int) -> dict[str, Any]:
    size = len(lab.hosts)
    numbers = (str(nbytes), str(buckets), str(rounds))
    results = run([lab.mpirun(size, PROGRAM, "mpi", *numbers)])
    addresses = [f"{NETWORK}.{number}" for number in range(1, size + 1)]
    pythons = {"ring": sys.executable}
    if torch is not None:
        pythons["gloo"] = torch
    for host in lab.hosts:
        ring = [[f"{address}:{PORT}"] for address in addresses]
        (lab.home(host) / "ring.json").write_text(json.dumps(ring))
    for way, python in pythons.items():
        commands = []
        for rank, host in enumerate(lab.hosts):
            settings = {
                "MLX_RANK": rank, "MLX_HOSTFILE": "ring.json", "RANK": rank, "WORLD_SIZE": size,
                "MASTER_ADDR": addresses[0], "MASTER_PORT": PORT, "GLOO_SOCKET_IFNAME": "eth0",
            }  # fmt: skip
            given = [f"{name}={value}" for name, value in settings.items()]
            commands.append(lab.command(host, "env", *given, python, PROGRAM, way, *numbers))
        results |= run(commands)
    return results


def table_of(measured: Sequence[Mapping[str, Any]]) -> Table:
    """Return the table of what was measured: seconds and bytes of each round of each way."""
    ways = list(dict.fromkeys(way for each in measured for way in each["seconds"]))
    lines = []
    for each in measured:
        n, bound = each["hosts"], each["bound"]
        line = [each["rate"], str(n), f"{each['buckets']} x {each['nbytes'] >> 20} MiB"]
        line.append(f"{bound:.2f} s")
        for way in ways:
            rounds = each["seconds"].get(way)
            if rounds is None:
                line.append("")
                continue
            seconds = statistics.median(seconds for seconds, _ in rounds)
            sent = max(nbytes for _, nbytes in rounds) / each["bytes"]
            line.append(f"{seconds / bound:.2f} ({sent:.2f})")
        lines.append(line)
    header = ("link", "hosts", "buckets", "bound", *(f"{way} x (bytes x)" for way in ways))
    return Table("Sums between hosts, as multiples of the bandwidth bound", header, lines)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--rates", nargs="*", default=["100mbit", "1gbit"])
    parser.add_argument("--sizes", nargs="*", type=int, default=[2, 3, 4])
    parser.add_argument("--torch", metavar="PYTHON", help="a Python that has torch")
    options = parser.parse_args()
    if lacks := missing():
        raise SystemExit(lacks)
    work = QUICK if options.quick else Work()
    facts = machine()
    measured = []
    for rate in options.rates:
        for size in options.sizes:
            with tempfile.TemporaryDirectory() as name, hosts(Path(name), size, rate=rate) as lab:
                for buckets in work.buckets:
                    nbytes = work.nbytes(rate)
                    rounds = options.rounds or (work.rounds if buckets == 1 else 1)
                    seconds = measure(lab, options.torch, nbytes, buckets, rounds)
                    shared = 2 * (size - 1) / size * buckets * nbytes
                    measured.append(
                        {
                            "rate": rate, "hosts": size, "buckets": buckets, "nbytes": nbytes,
                            "bytes": shared, "bound": shared / bytes_a_second(rate),
                            "seconds": seconds,
                        }
                    )  # fmt: skip
                    print(measured[-1], file=sys.stderr, flush=True)
    publish(options, facts, [table_of(measured)], {"sums": measured})


if __name__ == "__main__":
    main()
