"""Requests for structured output, as clients state them: JSON by schema, and calls of a forced tool.

Strings, arrays and numbers have bounds, so that the texts of a model that was not trained for this end, too.
Most clients state no bounds of strings, so that JSON is also asked for without these.
"""

import json
from typing import Any, NamedTuple

SCHEMA, UNBOUNDED, TOOL = "JSON by schema", "JSON, strings without bounds", "tool call"
KINDS = (SCHEMA, UNBOUNDED, TOOL)
TEMPERATURE = 0.7


class StructuredTask(NamedTuple):
    """A request but for its seed."""

    kind: str  # one of `KINDS`
    name: str
    body: dict[str, Any]  # fields of a chat completion

    def request(self, seed: int, max_tokens: int) -> dict[str, Any]:
        """The body of a chat completion.

        Args:
            seed: the seed of the request.
            max_tokens: tokens of the answer, at most.
        """
        return {**self.body, "temperature": TEMPERATURE, "max_tokens": max_tokens, "seed": seed}


def string(longest: int) -> dict[str, Any]:
    """A schema of strings of so many characters at most."""
    return {"type": "string", "maxLength": longest}


def whole_number(least: int, most: int) -> dict[str, Any]:
    """A schema of integers between bounds."""
    return {"type": "integer", "minimum": least, "maximum": most}


def one_of(*values: str) -> dict[str, Any]:
    """A schema of these strings."""
    return {"type": "string", "enum": [*values]}


def array(items: dict[str, Any], least: int, most: int) -> dict[str, Any]:
    """A schema of arrays.

    Args:
        items: the schema of an entry.
        least: entries at least.
        most: entries at most.
    """
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


def record(**properties: dict[str, Any]) -> dict[str, Any]:
    """A schema of objects that have all of these properties and no others."""
    return {
        "type": "object",
        "properties": properties,
        "required": [*properties],
        "additionalProperties": False,
    }


DATE = {"type": "string", "pattern": "^20[0-9]{2}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])$"}
TEXTS = {
    "invoice": (
        "Invoice 20417 of 3 March 2025, Hanse Werkzeuge GmbH, Speicherstadt 4, 20457 Hamburg, to "
        "Marta Lind. 2 cordless drills at 149 EUR, 5 sets of wood screws at 12 EUR, 1 work lamp at 38 "
        "EUR. Not yet paid."
    ),
    "incident": (
        "02:14 checkout-api returns 502 for a third of the requests. 02:20 database connections "
        "exhausted. 02:41 pool enlarged and service restarted. 02:50 error rate normal. Customers "
        "could not pay for half an hour."
    ),
    "review": (
        "The headphones are light and sound clear, but the hinge broke after two months, and support "
        "took three weeks to answer. I would buy the brand again, not this model."
    ),
    "deployment": (
        "Run the image registry.local/shop:4.2 with three replicas behind the load balancer, 512 MB "
        "and half a core each, health checks every ten seconds, and the variables LOG_LEVEL and "
        "REGION."
    ),
}
SCHEMAS = {
    "invoice": record(
        invoice_number=whole_number(1, 99999),
        issue_date=DATE,
        supplier=record(
            company_name=string(32),
            address=record(street=string(24), postal_code=string(8), city=string(16)),
        ),
        customer_name=string(24),
        line_items=array(
            record(
                description=string(24),
                quantity=whole_number(1, 99),
                unit_price=whole_number(1, 9999),
                tax_category=one_of("standard", "reduced", "exempt"),
            ),
            2,
            5,
        ),
        currency=one_of("EUR", "USD", "GBP"),
        payment_status=one_of("open", "partially_paid", "paid", "overdue"),
    ),
    "incident": record(
        title=string(40),
        severity=one_of("low", "medium", "high", "critical"),
        affected_services=array(one_of("checkout-api", "database", "search", "web"), 1, 3),
        timeline=array(
            record(
                minute=whole_number(0, 59),
                actor=one_of("monitoring", "on_call_engineer", "customer"),
                event=string(40),
            ),
            2,
            5,
        ),
        root_cause=record(
            category=one_of("capacity", "configuration", "code", "network"), explanation=string(60)
        ),
        customer_impact={"type": "boolean"},
        resolved={"type": "boolean"},
    ),
    "review": record(
        overall_sentiment=one_of("positive", "mixed", "negative"),
        star_rating=whole_number(1, 5),
        aspects=array(
            record(
                aspect=one_of("comfort", "sound", "build_quality", "price", "support"),
                sentiment=one_of("positive", "neutral", "negative"),
                quotation=string(32),
            ),
            2,
            4,
        ),
        would_recommend={"type": "boolean"},
        summary=string(60),
    ),
    "deployment": record(
        name=string(20),
        image=record(repository=string(24), tag=string(8), pull_policy=one_of("Always", "IfNotPresent")),
        replicas=whole_number(1, 20),
        resources=record(memory_megabytes=whole_number(64, 8192), cpu_millicores=whole_number(50, 8000)),
        health_check=record(
            path=string(16),
            interval_seconds=whole_number(1, 60),
            timeout_seconds=whole_number(1, 30),
            failure_threshold=whole_number(1, 10),
        ),
        environment=array(record(name=string(16), value=string(16)), 1, 4),
        restart_policy=one_of("Always", "OnFailure", "Never"),
    ),
}


def function(name: str, description: str, **properties: dict[str, Any]) -> dict[str, Any]:
    """A tool.

    Args:
        name: the name of the function.
        description: what it does.
        **properties: the schemas of its arguments, all of which are required.
    """
    parameters = record(**properties)
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": parameters},
    }


TOOLS = (
    function(
        "get_weather_forecast",
        "The weather of the next days at a place.",
        location=record(city=string(20), country_code=one_of("DE", "FR", "GB", "JP", "US")),
        days=whole_number(1, 14),
        units=one_of("metric", "imperial"),
        include_hourly={"type": "boolean"},
    ),
    function(
        "create_calendar_event",
        "Enter an event into the calendar and invite people.",
        title=string(32),
        start=record(date=DATE, hour=whole_number(0, 23), minute=whole_number(0, 59)),
        duration_minutes=whole_number(5, 480),
        attendees=array(record(name=string(20), email=string(24), role=one_of("required", "optional")), 1, 3),
        reminder=one_of("none", "ten_minutes", "one_hour", "one_day"),
    ),
    function(
        "query_orders",
        "Search the orders of the shop.",
        filters=array(
            record(
                field=one_of("status", "customer_id", "total", "created_at"),
                operator=one_of("equals", "not_equals", "greater_than", "less_than", "contains"),
                value=string(16),
            ),
            1,
            3,
        ),
        sort_by=one_of("created_at", "total", "customer_id"),
        sort_order=one_of("ascending", "descending"),
        limit=whole_number(1, 200),
    ),
)
QUESTIONS = {
    "get_weather_forecast": "Will it rain in Lyon this week? In degrees Celsius, hour by hour if you can.",
    "create_calendar_event": (
        "Set up an hour with Ana Ruiz and Tom Berg on 14 May at 10:30 about the budget, Tom only if he has "
        "time, and remind me an hour before."
    ),
    "query_orders": "Show me the hundred largest orders of customer 8812 that have not been shipped yet.",
}


def unbounded(schema: Any) -> Any:
    """A schema, or a part of one, without the bounds of its strings."""
    if isinstance(schema, dict):
        return {key: unbounded(value) for key, value in schema.items() if key != "maxLength"}
    return [unbounded(value) for value in schema] if isinstance(schema, list) else schema


def structured_tasks() -> list[StructuredTask]:
    """The tasks of all kinds."""
    tasks = []
    for kind, schemas in ((SCHEMA, SCHEMAS), (UNBOUNDED, unbounded(SCHEMAS))):
        for name, schema in schemas.items():
            shown = json.dumps(schema)
            system = f"Extract what the text says, as JSON that satisfies this schema: {shown}"
            form = {"type": "json_schema", "json_schema": {"name": name, "schema": schema}}
            body = {"messages": messages(system, TEXTS[name]), "response_format": form}
            tasks.append(StructuredTask(kind, name, body))
    for name, question in QUESTIONS.items():
        choice = {"type": "function", "function": {"name": name}}
        body = {"messages": messages("Answer by calling a function.", question), "tools": [*TOOLS]}
        tasks.append(StructuredTask(TOOL, name, {**body, "tool_choice": choice}))
    return tasks


def messages(system: str, user: str) -> list[dict[str, str]]:
    """A conversation of one question."""
    return [{"role": "system", "content": system}, {"role": "user", "content": user}]
