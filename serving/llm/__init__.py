"""`LLM`: batches from Python through the serving engine, in this process and without a server."""

from .llm import LLM
from .lora_request import LoRARequest
from .outputs import CompletionOutput, RequestOutput

__all__ = ["LLM", "CompletionOutput", "LoRARequest", "RequestOutput"]
