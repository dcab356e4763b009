"""The comparisons of the algorithms, their tasks, and their results."""
