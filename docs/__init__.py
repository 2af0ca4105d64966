"""The documentation site: its sources, and `python -m docs`, which builds it."""
