"""Where TorchAir keeps its converters; dumps import `ge_apis` from here."""
