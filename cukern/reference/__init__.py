"""NumPy references define the correct results of `cukern`'s functions. `cukern.ops` checks the arguments first."""
