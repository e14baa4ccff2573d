"""Play worlds of the product's rooms by seed.

    python -m tests.helpers.worlds --count 10000

Prints, of each room, its worlds, the things that happened, and the CPU seconds; of each world in
which an invariant does not hold, its seed, and the last things that happened. Returns 1 if there is
one.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from tests.helpers.worlds.all_rooms import ROOMS
from tests.helpers.worlds.rooms import Room, tally


def main(arguments: Sequence[str] | None = None) -> int:
    """Play worlds; return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--room", choices=[room.name for room in ROOMS], help="the only room")
    parser.add_argument("--count", type=int, default=2000, help="worlds of each room")
    parser.add_argument("--first", type=int, default=0, help="seed of the first world")
    parser.add_argument("--most", type=int, default=3, help="failures of a room that are shown")
    options = parser.parse_args(arguments)
    failures = 0
    for room in ROOMS:
        if options.room in (None, room.name):
            failures += _play(room, options.first, options.count, options.most)
    return int(failures > 0)


def _play(room: Room, first: int, count: int, most: int) -> int:
    shown = 0

    def report(seed: int, error: Exception) -> None:
        nonlocal shown
        shown += 1
        if shown <= most:
            print(
                f"{room.name}, world {seed}: {error!r}", *getattr(error, "__notes__", ()), sep="\n"
            )

    found = tally(room, first, count, report)
    print(
        f"{room.name}: {found.worlds} worlds, {found.things} things, {found.seconds:.1f} CPU s, "
        f"{found.failures} failures",
        flush=True,
    )
    return found.failures


if __name__ == "__main__":
    sys.exit(main())
