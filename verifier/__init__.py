"""Grading: reading LaTeX, comparing values, workers, the sandbox."""
