#!/usr/bin/env python3
"""How fast mlx-lm's tensor shares decode between two hosts, beside one process and a formula.

    python scripts/bench/tensor_shares.py [--delays 0 0.3 1] [--json FILE]

Hosts are network namespaces (root, Linux), each with one core and one BLAS thread; a relay in each
delays the messages of MLX's ring by so many milliseconds, one way. A Llama of 8 layers and width
1024 in float32 is divided by mlx-lm's ``shard()``. A sum of two ranks takes two messages, one after
the other. The formula: time of one process by the bytes of a share, and two sums a layer.

Three minutes on two cores.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from _compare import ROOT, Table, machine, parser_of, publish
from _models import WIDE
from sums import run

sys.path.insert(0, str(ROOT))
sys.path.insert(0, str(ROOT / "scripts"))

from _fits import faster_by_shares

from tests.helpers.hosts import Lab, hosts, missing

RING_PORT, RELAY_PORT = 5000, 5001


def measure(lab: Lab, milliseconds: float, tokens: int, rounds: int) -> dict[str, Any]:
    """Return what rank 0 has measured over a link with this delay; without one, over no relay."""
    own = [f"{lab.address(host)}:{RING_PORT}" for host in lab.hosts]
    with ExitStack() as stack:
        commands = []
        for rank, host in enumerate(lab.hosts):
            addresses = [[address] for address in own]
            if milliseconds:
                addresses[1 - rank] = [f"127.0.0.1:{RELAY_PORT}"]
                peer = lab.address(lab.hosts[1 - rank])
                numbers = (str(RELAY_PORT), peer, str(RING_PORT), str(milliseconds / 1000))
                program = (sys.executable, ROOT / "scripts/bench/_relay.py", *numbers)
                relay = stack.enter_context(subprocess.Popen(lab.command(host, *program)))
                stack.callback(relay.kill)
            (lab.home(host) / "ring.json").write_text(json.dumps(addresses))
            variables = ("env", f"MLX_RANK={rank}", "MLX_HOSTFILE=ring.json")
            shares = (ROOT / "scripts/bench/_shares.py", str(tokens), str(rounds))
            commands.append(lab.command(host, *variables, sys.executable, *shares))
        return run(commands)


def cells(milliseconds: float, found: dict[str, Any]) -> tuple[str, ...]:
    """Return a line of the table; whatever disturbs a machine makes a token later."""
    alone, of_sum, together = map(min, zip(*found["rounds"], strict=True))
    whole, share = found["bytes"]
    divided = 2 * (1 - share / whole)
    formula = faster_by_shares(alone, divided, WIDE["num_hidden_layers"], of_sum)
    return (
        f"{milliseconds:g} ms",
        f"{1000 * of_sum:.2f} ms",
        f"{1 / alone:.1f}",
        f"{1 / together:.1f}",
        f"{alone / together:.2f}",
        f"{formula:.2f}",
        "same" if found["same_text"] else "another",
    )


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--delays", nargs="*", type=float, default=[0, 0.05, 0.1, 0.3, 1])
    options = parser.parse_args()
    if lacks := missing():
        raise SystemExit(lacks)
    facts = machine()
    tokens, rounds = (4, 1) if options.quick else (24, options.rounds or 5)
    lines, results = [], []
    for milliseconds in options.delays:
        with tempfile.TemporaryDirectory() as name, hosts(Path(name), 2) as lab:
            found = measure(lab, milliseconds, tokens, rounds)
        results.append({"delay_ms": milliseconds, **found})
        lines.append(cells(milliseconds, found))
        print("  ".join(lines[-1]), file=sys.stderr, flush=True)
    header = ("a message later by", "a sum", "tokens/s of one", "of two", "ratio", "by formula")
    table = Table("Tensor shares of two", (*header, "text"), lines)
    publish(options, facts, [table], {"tensor_shares": results})


if __name__ == "__main__":
    main()
