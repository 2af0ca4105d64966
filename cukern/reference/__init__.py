"""NumPy references: the same functions with the same arguments, and the definition of correct."""
