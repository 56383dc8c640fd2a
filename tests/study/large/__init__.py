"""Tests of large networks, on small ones."""
