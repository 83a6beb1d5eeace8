"""Paired measurements, never timed tests. Run them on an otherwise idle machine."""
