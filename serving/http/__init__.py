"""OpenAI- and vLLM-compatible HTTP server: routes, protocol, metrics, and the dashboard."""
