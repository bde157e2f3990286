"""The target's p against the drafter's q, row by row, in chunks."""
