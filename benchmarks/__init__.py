"""Measurements against named peers; none of them is a test."""
