"""The bodies of requests and answers, in the names of OpenAI and vLLM."""
