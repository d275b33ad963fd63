"""Kernels: one folder per operation, with a back end for each platform and a reference in plain JAX."""
