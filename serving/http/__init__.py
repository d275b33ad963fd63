"""The engine behind HTTP, as OpenAI and vLLM speak it: routes, protocol, metrics, and the dashboard."""
