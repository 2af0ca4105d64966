"""Integrations that run other libraries' models on cukern's kernels, one module per library."""
