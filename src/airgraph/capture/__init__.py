"""The way in: AOTAutograd and the passes on FX graphs."""
