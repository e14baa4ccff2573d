"""Run ``shardmlx plan`` as ``python -m shardmlx.plan``."""

from shardmlx.main import run_module

if __name__ == "__main__":
    run_module("plan")
