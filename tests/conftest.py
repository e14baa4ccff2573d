"""Sets the process up before any test module imports MLX, as the commands of shardmlx do."""

from shardmlx.environment import prepare

prepare()
