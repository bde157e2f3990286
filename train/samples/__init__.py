"""The target's answers as they are stored: the store, its manifest, packing, audit."""
