"""Programs that tests start on ranks."""

from __future__ import annotations

from testbed.jobs import ROOT

PROGRAMS = ROOT / "tests/mpi/programs"
