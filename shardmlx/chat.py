"""Run ``shardmlx chat`` as ``python -m shardmlx.chat``."""

from shardmlx.main import run_module

if __name__ == "__main__":
    run_module("chat")
