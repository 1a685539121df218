"""``python -m mlx_gguf.cli``: the command ``mlx-gguf``."""

import sys

from . import main

sys.exit(main())
