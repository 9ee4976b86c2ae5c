"""Faster ways to compute the same numbers: shared prompt, frozen head, memory-efficient layers."""
