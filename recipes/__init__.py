"""The front door: the `draftsmith` command, and one YAML per (target, drafter)."""
