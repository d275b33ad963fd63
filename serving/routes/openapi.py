"""/openapi.json as this server is: the limits of its model, its keys, its one form of errors."""

from typing import Any

from fastapi import FastAPI

from ..frontend import Frontend


def install(app: FastAPI, frontend: Frontend) -> None:
    """Let the document say what FastAPI cannot know."""
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
    last = frontend.model.vocabulary - 1
    for name in ("CompletionBody", "DetokenizeBody", "ChatBody"):
        for field in ("prompt", "tokens", "stop_token_ids"):
            if field in schemas[name]["properties"]:
                _tokens(schemas[name]["properties"][field], last)
    for name in ("CompletionBody", "ChatBody"):
        for part in schemas[name]["properties"]["stop"]["anyOf"]:
            if part.get("type") == "array":
                part["maxItems"] = frontend.settings.limits.stops


def _tokens(schema: dict[str, Any], last: int) -> None:
    """Lower the maximum of every integer below to the last token."""
    if schema.get("type") == "integer":
        schema["maximum"] = last
    for part in [*schema.get("anyOf", []), *([schema["items"]] if "items" in schema else [])]:
        _tokens(part, last)
