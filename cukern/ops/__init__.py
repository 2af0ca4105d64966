"""The public functions: one module for each family of kernels."""
