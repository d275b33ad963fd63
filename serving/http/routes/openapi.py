"""/openapi.json with what FastAPI does not know: limits of the model, API keys, the form of errors."""

from typing import Any

from fastapi import FastAPI

from ..frontend import Frontend


def install(app: FastAPI, frontend: Frontend) -> None:
    """Add what FastAPI does not know to the document."""
    plain = app.openapi

    def described() -> dict[str, Any]:
        if app.openapi_schema is None:
            tree = plain()
            schemas = tree["components"]["schemas"]
            for name in ("HTTPValidationError", "ValidationError"):
                schemas.pop(name, None)  # what is invalid is answered as 400, with an ErrorAnswer
            for path in tree["paths"].values():
                for operation in path.values():
                    operation["responses"].pop("422", None)
                    if frontend.settings.api_keys and "401" in operation["responses"]:
                        operation["security"] = [{"key": []}]
            if frontend.settings.api_keys:
                tree["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
            _limit(schemas, frontend)
            app.openapi_schema = tree
        return app.openapi_schema

    app.openapi = described  # type: ignore[method-assign]


def _limit(schemas: dict[str, Any], frontend: Frontend) -> None:
    """Write this server's limits where the protocol leaves them open."""
    law = dict(frontend.settings.control.gains).get("law", "normalised")
    schemas["Entropic"]["properties"]["law"]["anyOf"][0]["enum"] = [law]
    last = frontend.model.vocabulary - 1
    bodies = [schema["properties"] for name, schema in schemas.items() if name.endswith("Body")]
    for properties in bodies:
        for field in ("prompt", "input", "tokens", "stop_token_ids", "allowed_token_ids"):
            if field in properties:
                _tokens(properties[field], last)
    size = frontend.engine.embedding_limits.dimensions
    schemas["EmbeddingsBody"]["properties"]["dimensions"]["anyOf"][0]["maximum"] = size
    longest = frontend.settings.limits.tokenize
    schemas["TokenizeBody"]["properties"]["prompt"]["maxLength"] = longest
    schemas["DetokenizeBody"]["properties"]["tokens"]["maxItems"] = longest
    for properties in bodies:
        for field in {"n", "best_of"} & properties.keys():
            number = properties[field]["anyOf"][0]
            number["maximum"] = min(number["maximum"], frontend.settings.limits.sequences)
        for field in {"stop", "stop_sequences"} & properties.keys():
            for part in properties[field]["anyOf"]:
                if part.get("type") == "array":
                    part["maxItems"] = frontend.settings.limits.stops
        for part in properties.get("logit_bias", {}).get("anyOf", ()):
            if part.get("type") == "object":
                (bias,) = part["patternProperties"].values()
                part["patternProperties"] = {up_to(last): bias}
                part["additionalProperties"] = False


def up_to(last: int) -> str:
    """An expression for the integers from 0 to `last`, as JSON's keys write them.

    >>> up_to(305)
    '^(?:[0-9]|[1-9][0-9]|[1-2][0-9]{2}|30[0-5])$'
    """
    digits = str(last)
    size = len(digits)
    shorter = ["[0-9]" if size > 1 else f"[0-{last}]"]
    shorter += ["[1-9][0-9]" + (f"{{{n}}}" if n > 1 else "") for n in range(1, size - 1)]
    same = []
    for place, digit in enumerate(digits if size > 1 else ""):
        low, high = 1 if place == 0 else 0, int(digit) - (place < size - 1)
        if low <= high:
            rest = size - place - 1
            tail = "" if not rest else "[0-9]" if rest == 1 else f"[0-9]{{{rest}}}"
            same.append(digits[:place] + (f"[{low}-{high}]" if low < high else str(low)) + tail)
    return f"^(?:{'|'.join([*shorter, *same])})$"


def _tokens(schema: dict[str, Any], last: int) -> None:
    """Lower the maximum of every integer below to the last token."""
    if schema.get("type") == "integer":
        schema["maximum"] = last
    for part in [*schema.get("anyOf", []), *([schema["items"]] if "items" in schema else [])]:
        _tokens(part, last)
