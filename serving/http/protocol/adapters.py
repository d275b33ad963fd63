"""`/v1/load_lora_adapter` and `/v1/unload_lora_adapter`, with vLLM's fields."""

from typing import Annotated, Any

from pydantic import Field, model_validator

from .fields import Body, unicode

Name = Annotated[str, Field(min_length=1, max_length=200)]


class UnloadAdapterBody(Body):
    """An adapter that requests can no longer name."""

    lora_name: Name
    lora_int_id: Any = Field(None, description="ignored: adapters are known by name")

    _unicode = model_validator(mode="before")(unicode)


class LoadAdapterBody(Body):
    """An adapter to be loaded."""

    lora_name: Name = Field(description="the name that requests will state as `model`")
    lora_path: Annotated[str, Field(min_length=1, max_length=4096)] = Field(
        description="a directory in PEFT's format, below the server's --lora-dir"
    )
    load_inplace: bool | None = Field(None, description="true is refused: unload the adapter first")

    _unicode = model_validator(mode="before")(unicode)
