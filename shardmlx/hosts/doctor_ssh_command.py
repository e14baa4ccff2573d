"""Carries out ``shardmlx doctor --ssh``: asks the hosts whether they can run a job at all."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from shardmlx.common.cli import run_command
from shardmlx.common.environment import launched_rank
from shardmlx.common.reporter import check_writable
from shardmlx.config.doctor import LINE, STDOUT
from shardmlx.hosts.doctor_report import deliver, progress, visit_content, visit_text
from shardmlx.hosts.doctor_ssh import visit


def run(words: Sequence[str]) -> int | None:
    """Ask the hosts with ssh and return the exit status: 0, 1 for warnings with ``--strict``, or 2
    after bad input. Return None without ``--ssh``: then ranks look."""
    if "--ssh" not in words:
        return None
    return run_command(lambda: _ask(words)) if launched_rank() == 0 else 0  # one asks for all


def _ask(words: Sequence[str]) -> int:
    options = LINE.load(words)
    if options.json not in (None, STDOUT):
        check_writable(Path(str(options.json)), "--json")
    progress(f"asking the hosts of {options.hostfile} with {options.agent or 'ssh'}")
    found = visit(str(options.hostfile), options.agent, options.python)
    deliver(visit_text(found), visit_content(found), options.json)
    return 1 if options.strict and found.findings else 0
