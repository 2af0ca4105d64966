"""NumPy references: the same functions with the same arguments. They define the correct results."""
