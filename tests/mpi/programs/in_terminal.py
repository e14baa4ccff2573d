"""Run a command in a terminal of its own: ``in_terminal.py TALK COMMAND...``.

TALK is a JSON list of [words to wait for, what to type then]. All that the terminal shows goes to
stdout, and the exit status is the command's.
"""

import json
import os
import pty
import sys

talk = json.loads(sys.argv[1])
child, terminal = pty.fork()
if child == 0:
    os.execv(sys.argv[2], sys.argv[2:])
shown = b""
while True:
    try:
        part = os.read(terminal, 1 << 12)
    except OSError:  # Linux says so that nobody has the terminal any more
        break
    if not part:
        break
    sys.stdout.buffer.write(part)
    shown += part
    while talk and talk[0][0].encode() in shown:
        words, answer = talk.pop(0)
        # What follows the words may have come with them.
        shown = shown.split(words.encode(), 1)[1]
        os.write(terminal, answer.encode())
_, status = os.waitpid(child, 0)
sys.exit(os.waitstatus_to_exitcode(status))
