"""Losses on the table of row statistics, and what each depth and anchor weighs."""
