"""Calls into PyTorch from native code, through its stable C ABI."""
