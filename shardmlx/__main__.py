"""Run ``shardmlx`` as ``python -m shardmlx``, and a command as ``python -m shardmlx.NAME``."""

import sys

from shardmlx.main import main

if __name__ == "__main__":
    name = __spec__.name.rpartition(".")[2] if __spec__ else "__main__"
    raise SystemExit(main(sys.argv[1:] if name == "__main__" else [name, *sys.argv[1:]]))
