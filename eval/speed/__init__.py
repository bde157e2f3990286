"""What rounds cost: clocks, the speed model, the bench."""
