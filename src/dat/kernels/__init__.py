"""Compiled kernels, each with its Python binding and a torch equivalent."""
