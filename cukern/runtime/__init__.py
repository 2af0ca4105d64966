"""What every op stands on: arrays, validation, compilation and launch."""
