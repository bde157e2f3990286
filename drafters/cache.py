"""Where draftsmith keeps what it can make again: converted checkpoints, built kernels."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """DRAFTSMITH_CACHE, or ~/.cache/draftsmith; it may not exist yet."""
    return Path(os.path.expanduser(os.environ.get("DRAFTSMITH_CACHE") or "~/.cache/draftsmith"))
