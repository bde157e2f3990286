"""Where the target's states come from: this process (computed.py), or a cache on disk."""
