"""Attention to the paged KV cache: which pages are read, how they are attended to, and statistics of it."""
