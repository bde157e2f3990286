"""Samples -> a trained drafter."""
