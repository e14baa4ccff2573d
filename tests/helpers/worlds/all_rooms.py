"""All rooms that are played in worlds."""

from __future__ import annotations

from tests.helpers.worlds.commands import COMMANDS
from tests.helpers.worlds.islands import ISLANDS
from tests.helpers.worlds.job_faults import JOBS
from tests.helpers.worlds.launches import LAUNCHES
from tests.helpers.worlds.requests import REQUESTS
from tests.helpers.worlds.rooms import Room
from tests.helpers.worlds.saves import SAVES

ROOMS: tuple[Room, ...] = (JOBS, COMMANDS, REQUESTS, SAVES, ISLANDS, LAUNCHES)
