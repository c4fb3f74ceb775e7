"""Gradient quantization: the C kernel, its binding, and a reference implementation in torch."""
