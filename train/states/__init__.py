"""Where the target's states come from: this process, or a cache on disk."""
