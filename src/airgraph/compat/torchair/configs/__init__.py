"""TorchAir's configuration: `compiler_config.CompilerConfig`, built from the table in `options`."""
