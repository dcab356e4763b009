"""The rules of curate.py: which rows of a data set make training problems."""
