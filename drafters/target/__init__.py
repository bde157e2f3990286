"""The frozen target: how it is found, loaded, read, checked; its shell alone; its caches."""
