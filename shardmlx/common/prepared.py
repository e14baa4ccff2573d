"""Prepare this process when imported: for programs whose first import this is.

``prepare()`` has to run before ``mlx.core`` and ``mpi4py`` are imported. A command imports these
late, inside a function; a script that has them at its top imports this module before. The order of
imports in pyproject.toml keeps it there.
"""

from shardmlx.common.environment import prepare

BLAS = prepare()
