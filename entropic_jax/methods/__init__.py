"""Published methods, one per file, on the loop, the paged cache and its kernels."""
