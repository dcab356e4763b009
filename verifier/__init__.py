"""Grading: reading LaTeX, comparing values, worker processes, the sandbox for programs."""
