"""Judgers that are ready to use."""
