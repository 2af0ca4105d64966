"""NumPy references of the kernels. They have the same functions with the same arguments, and define correct results."""
