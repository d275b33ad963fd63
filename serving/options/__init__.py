"""Options of the command line, `LLM` and the server: their names, what they accept, and what they build."""
