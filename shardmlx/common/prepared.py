"""Prepare this process when imported, for programs that import it first.

``prepare()`` has to run before ``mlx.core`` and ``mpi4py`` are imported. A command imports these
late, inside a function; a script that imports them at its top imports this module first. The order
of imports in pyproject.toml keeps it there.
"""

from shardmlx.common.environment import prepare

BLAS = prepare()
