"""Tools that come along."""
