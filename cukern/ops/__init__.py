"""The public functions, one module per stem."""
