"""A drafter -> numbers: acceptance, speed, parity."""
