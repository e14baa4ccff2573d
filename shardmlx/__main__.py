"""Run a command as ``python -m shardmlx COMMAND``."""

from shardmlx.main import main

if __name__ == "__main__":
    raise SystemExit(main())
