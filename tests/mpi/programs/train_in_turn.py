"""``train_in_turn.py ARGUMENTS -- ARGUMENTS ...``: runs of ``shardmlx.train``, one after the
other, on the same ranks."""

import sys
from itertools import groupby

from shardmlx.main import main

for between, arguments in groupby(sys.argv[1:], lambda word: word == "--"):
    if not between and (status := main(["train", *arguments])):
        sys.exit(status)
