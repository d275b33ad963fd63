"""The HTTP side: one module of routes a concern, over a `Frontend` that knows nothing of HTTP."""
