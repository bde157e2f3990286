"""What several drafter families share: layers, attention, heads."""
