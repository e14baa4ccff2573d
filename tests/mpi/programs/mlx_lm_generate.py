"""mlx_lm.generate's own main, in one process, in the environment of this project."""

import shardmlx.common.prepared

from mlx_lm.generate import main

if __name__ == "__main__":
    main()
