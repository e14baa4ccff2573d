#!/usr/bin/env python3
"""Record docs/pictures/first-run.cast: check, plan, train, Ctrl-C, resume, at a real terminal.

    python scripts/recording.py [--output FILE]

needs the demo's model and data (scripts/prepare_smollm2.py, scripts/prepare_pirate_data.py), and a
user who is not root, to whom mpirun would say more. What is typed stands below. The file is an
asciicast of version 2, one event a line; the path of this repository is written as ~/shardmlx, and
no pause is longer than a second and a half. The site shows the picture of the time that the link in
docs/README.md names, until somebody plays it: the script prints that time.
"""

from __future__ import annotations

from _root import ROOT

import argparse
import codecs
import fcntl
import json
import os
import pty
import select
import signal
import struct
import sys
import tempfile
import termios
import time
from dataclasses import dataclass, field
from pathlib import Path

CAST = ROOT / "docs" / "pictures" / "first-run.cast"
COLUMNS, LINES = 100, 30
PATIENCE = 300.0
LONGEST_PAUSE = 1.5
CTRL_C = "\x03"

OPTIONS = """\
model: smollm2
data: pirate
train: true
num_layers: 16
mask_prompt: true
batch_size: 8
max_seq_length: 128
learning_rate: 2e-4
iters: 12
val_batches: 2
steps_per_eval: 6
steps_per_report: 1
"""

PLAN = "shardmlx plan smollm2 -c pirate.yaml --hostfile measured --pipeline-stages 2 -o map.yaml"
TRAIN = "shardmlx launch --hostfile measured train -c pirate.yaml --stage-map map.yaml"

TYPED = [
    ("shardmlx launch -n 2 doctor --write-hostfile measured", ""),
    ("cat pirate.yaml", ""),
    (PLAN, ""),
    (TRAIN, "step 5: loss"),
    (TRAIN, ""),
]
"""Commands, and what one has shown when Ctrl-C is pressed."""


@dataclass
class Recording:
    """Events of a terminal; time passes only while something is shown or typed."""

    latest: float = field(default_factory=time.monotonic)
    seconds: float = 0.0
    events: list[tuple[float, str, str]] = field(default_factory=list)

    def show(self, text: str) -> None:
        now = time.monotonic()
        self.seconds += min(now - self.latest, LONGEST_PAUSE)
        self.latest = now
        text = text.replace(str(ROOT), "~/shardmlx")
        self.events.append((round(self.seconds, 3), "o", text))

    def type(self, command: str) -> None:
        self.show("\x1b[1;32m$\x1b[0m ")
        for letter in command:
            time.sleep(0.03)
            self.show(letter)
        time.sleep(0.5)
        self.show("\r\n")

    def run(self, command: str, stop_at: str) -> int:
        """Run a command at a terminal of its own; return its exit status."""
        process, terminal = pty.fork()
        if process == 0:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell's background jobs ignore it
            os.execvp("sh", ["sh", "-c", f"exec {command}"])
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        shown, before = "", ""
        while select.select([terminal], [], [], PATIENCE)[0]:
            try:
                text = decoder.decode(os.read(terminal, 1 << 16))
            except OSError:  # it has ended
                break
            if text != before:  # a bar that has not moved is drawn again
                self.show(text)
            before = text
            shown += text
            if stop_at and stop_at in shown:
                os.write(terminal, CTRL_C.encode())
                stop_at = ""
        else:
            sys.exit(f"{command}: nothing came for {PATIENCE:.0f} s")
        os.close(terminal)
        return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=CAST, metavar="FILE")
    output = parser.parse_args().output.absolute()
    if os.geteuid() == 0:
        sys.exit(
            "run this as a user who is not root: runuser -u NAME -- python scripts/recording.py"
        )
    recording = Recording()
    os.environ |= {"TERM": "xterm-256color", "COLUMNS": str(COLUMNS), "LINES": str(LINES)}
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    with tempfile.TemporaryDirectory() as directory:
        os.chdir(directory)
        Path("smollm2").symlink_to(ROOT / ".cache/smollm2-135m-instruct")
        Path("pirate").symlink_to(ROOT / ".cache/pirate")
        Path("pirate.yaml").write_text(OPTIONS)
        for command, stop_at in TYPED:
            recording.type(command)
            status = recording.run(command, stop_at)
            if status not in (0, 130):
                sys.exit(f"{command}: status {status}")
        os.chdir("/")
    header = {"version": 2, "width": COLUMNS, "height": LINES}
    lines = [json.dumps(each) for each in (header, *recording.events)]
    output.write_text("\n".join([*lines, ""]), encoding="utf-8")
    print(f"{output}: {output.stat().st_size} bytes; #t={recording.seconds:.0f} is its end")


if __name__ == "__main__":
    main()
