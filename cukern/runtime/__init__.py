"""Host code that all ops share: arrays, validation, compilation and launch."""
