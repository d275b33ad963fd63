"""Tables of parameters: sampling parameters, control gains, drafters. Every interface is derived from them.

`table` says what a table is. No module of this folder imports JAX or NumPy.
"""
