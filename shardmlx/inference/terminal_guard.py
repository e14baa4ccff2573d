"""Puts a terminal back as it was once whoever changed it has gone, however it went.

Run as a program with the terminal's path: it says when it has seen how the terminal is, and waits
for the end of its stdin. It must be in a session of its own, in which no terminal can stop it.
"""

from __future__ import annotations

import os
import sys
import termios


def guard(path: str) -> None:
    """Remember the settings of the terminal at ``path``, and set them again after stdin's end."""
    terminal = os.open(path, os.O_RDWR | os.O_NOCTTY)
    settings = termios.tcgetattr(terminal)
    print("ready", flush=True)
    while os.read(0, 1 << 10):
        pass
    termios.tcsetattr(terminal, termios.TCSANOW, settings)


if __name__ == "__main__":
    guard(sys.argv[1])
