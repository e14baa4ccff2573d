"""Announcements: commands on their way from rank 0 to every rank, each rank to the next."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from shardmlx.distributed.messages import Handle, buffer_of
from shardmlx.distributed.tags import FIRST_ENGINE_TAG
from shardmlx.distributed.transport import Outbox
from shardmlx.inference.commands import Commands, Decode, item_of

ANNOUNCEMENT_TAG = FIRST_ENGINE_TAG


@dataclass
class Announcer:
    """A rank's end of the announcements: those of the rank before, passed on to the next one.

    A number goes ahead: the bytes of the commands, which follow. A decode step that is its group's
    last one once more has none: the number is -1 for group 0, -2 for group 1. They go to the first
    ``size`` ranks.
    """

    outbox: Outbox
    size: int
    _last: dict[int, Decode] = field(default_factory=dict)

    def announce(self, commands: Commands, what: str) -> None:
        """Tell the next rank, if there is one. An error names this rank's work, ``what``."""
        transport = self.outbox.transport
        group = self._group_again(commands)
        if (peer := transport.rank + 1) == self.size:
            return
        if group is None:
            self.outbox.send_object(pickle.dumps(commands), peer, ANNOUNCEMENT_TAG, what)
        else:
            self.outbox.send(np.array([-1 - group], np.int64), peer, ANNOUNCEMENT_TAG, what)

    def await_next(self) -> Handle:
        """Post the receive of the number that goes ahead."""
        transport = self.outbox.transport
        return transport.receive(np.empty(1, np.int64), transport.rank - 1, ANNOUNCEMENT_TAG)

    def heard(self, announcement: Handle, who: Callable[[], str]) -> Commands:
        """Return what an announcement says whose number has come, and pass it on. ``who`` names
        this rank and its work."""
        number = int(announcement.array[0])
        commands = (self._last[-1 - number],) if number < 0 else self._received(number, who)
        self.announce(commands, who())
        return commands

    def _received(self, nbytes: int, who: Callable[[], str]) -> Commands:
        transport = self.outbox.transport
        peer = transport.rank - 1
        data = np.empty(nbytes, np.uint8)
        handle = transport.receive(data, peer, ANNOUNCEMENT_TAG)
        transport.wait(handle, lambda: f"{who()}, waiting for {transport.name(peer)}")
        commands: Commands = pickle.loads(buffer_of(data))
        return commands

    def _group_again(self, commands: Commands) -> int | None:
        """Return the group of a decode step that comes alone, and is the group's last one once
        more; note which is the last one now."""
        item = item_of(commands)
        if not isinstance(item, Decode):
            return None
        last = self._last.get(item.group)
        self._last[item.group] = item
        return item.group if last == item and len(commands) == 1 else None
