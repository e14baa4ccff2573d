"""mlx_lm.generate's own main, in one process, in the environment of this project."""

from shardmlx.common.environment import prepare

prepare()

from mlx_lm.generate import main  # noqa: E402 - after prepare()

if __name__ == "__main__":
    main()
