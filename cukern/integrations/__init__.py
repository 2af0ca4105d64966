"""Other libraries whose models run on the kernels of cukern, one module for each."""
