"""Run ``shardmlx serve`` as ``python -m shardmlx.serve``."""

from shardmlx.main import run_module

if __name__ == "__main__":
    run_module("serve")
