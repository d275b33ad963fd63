"""Back ends of `entropic chat`, of which one is any server with OpenAI's API."""

import http.client
import json
import ssl
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol
from urllib.parse import urlsplit

from ..options.control_options import Control
from ..request import RequestError

Message = Mapping[str, str]
TIMEOUT = 600.0  # seconds without a byte from a server


class Piece(NamedTuple):
    """The next part of an answer."""

    text: str
    entropy: float | None = None  # nats; None where it is not known
    thought: bool = False  # part of the model's reasoning, not of its answer
    finish_reason: str | None = None  # of the last piece


class ChatBackend(Protocol):
    """A model to talk with. Every method may raise RequestError, after which the conversation can go on."""

    @property
    def name(self) -> str:
        """The name of the model."""

    @property
    def preset(self) -> str | None:
        """The preset of control; None is the server's default."""

    def presets(self) -> Sequence[str]:
        """The presets that `use_preset` accepts."""

    def use_preset(self, preset: str) -> None:
        """Control the answers to come by a preset."""

    def reply(self, messages: Sequence[Message]) -> Iterator[Piece]:
        """The answer to a conversation as it is generated; closing the iterator ends the generation."""

    def close(self) -> bool:
        """Give back what the back end holds, and return whether its threads have ended."""


def check_preset(preset: str, accepted: Sequence[str]) -> None:
    """Raise RequestError for a preset that is not accepted."""
    if preset not in accepted:
        raise RequestError(f"/preset must be one of {', '.join(accepted)}; got {preset}", "preset")


class RemoteChat:
    """A server with OpenAI's chat completions. One of entropic_jax sends the entropies of tokens as well."""

    def __init__(
        self,
        url: str,
        api_key: str | None,
        model: str | None,
        control: Control,
        overrides: Mapping[str, Any],
    ) -> None:
        """A back end over a server that runs.

        Args:
            url: the URL of the server; `/v1` may be left out.
            api_key: sent as a bearer token; None sends none.
            model: name; None is the first that the server lists.
            control: preset, None for the server's, and gains.
            overrides: fields of every request.

        Raises:
            RequestError: The URL is not one, or no server answers there.
        """
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise RequestError(f"--url must be http://host:port or https://host; got {url}")
        if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
            raise RequestError("--api-key must be printable ASCII, which a header can hold")
        self.url, self._parts = url, parts
        self._base = parts.path.rstrip("/").removesuffix("/v1")
        self._key, self.overrides = api_key, dict(overrides)
        cards = self._read_json("/v1/models").get("data") or [{}]
        self.name = model or str(cards[0].get("id", "default"))
        self.reports_entropy = any(card.get("owned_by") == "entropic_jax" for card in cards)
        self.preset: str | None = control.preset or None
        self._gains = dict(control.gains)
        if (self.preset or self._gains) and not self.reports_entropy:
            self._refuse_presets()

    def presets(self) -> Sequence[str]:
        """The presets that the server accepts."""
        if not self.reports_entropy:
            self._refuse_presets()
        return tuple(self._read_json("/entropic/state").get("presets", ("off",)))

    def _refuse_presets(self) -> None:
        raise RequestError(f"a preset needs a server of entropic_jax; {self.url} is none", "preset")

    def use_preset(self, preset: str) -> None:
        """Control the answers to come by a preset, with its default gains."""
        check_preset(preset, self.presets())
        self.preset, self._gains = preset, {}

    def reply(self, messages: Sequence[Message]) -> Iterator[Piece]:
        """The answer to a conversation as it is generated."""
        body: dict[str, Any] = {"model": self.name, "messages": list(messages), "stream": True}
        if self.reports_entropy:
            preset = {"preset": self.preset} if self.preset else {}
            body["entropic"] = {"trace": True, **preset, **self._gains}
        connection, response = self._send("POST", "/v1/chat/completions", {**body, **self.overrides})
        try:
            for line in response:
                if not line.startswith(b"data:"):
                    continue
                payload = line.removeprefix(b"data:").strip()
                if payload == b"[DONE]":
                    return
                yield from pieces_of(json.loads(payload))
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise RequestError(f"{self.url} broke off: {error}") from None
        finally:
            connection.close()

    def close(self) -> bool:
        """Nothing is held between requests."""
        return True

    def _read_json(self, path: str) -> dict[str, Any]:
        connection, response = self._send("GET", path)
        try:
            value = json.loads(response.read())
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise RequestError(
                f"--url must be a server with OpenAI's API; got {self.url} ({error})"
            ) from None
        finally:
            connection.close()
        return value if isinstance(value, dict) else {}

    def _send(
        self, method: str, path: str, body: Any = None
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        """The connection of a request, and the response, which is a success."""
        kind: Any = http.client.HTTPConnection
        options: dict[str, Any] = {"timeout": TIMEOUT}
        if self._parts.scheme == "https":
            kind, options["context"] = http.client.HTTPSConnection, ssl.create_default_context()
        connection = kind(self._parts.hostname, self._parts.port, **options)
        headers = {"Accept": "*/*"} | ({} if self._key is None else {"Authorization": f"Bearer {self._key}"})
        payload = None if body is None else json.dumps(body).encode()
        if payload is not None:
            headers["Content-Type"] = "application/json"
        try:
            connection.request(method, self._base + path, payload, headers)
            response = connection.getresponse()
            if response.status >= 400:
                message = error_message(response.read())
                raise RequestError(f"{self.url} answered {response.status}: {message}")
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise RequestError(f"--url must be a running server; got {self.url} ({error})") from None
        return connection, response


def pieces_of(event: Mapping[str, Any]) -> Iterator[Piece]:
    """The pieces of an event of chat completions. Raises RequestError for an event that is an error."""
    if "error" in event:
        raise RequestError(error_message(json.dumps(event).encode()))
    for choice in event.get("choices") or ():
        delta = choice.get("delta") or {}
        if thought := delta.get("reasoning_content") or delta.get("reasoning"):
            yield Piece(thought, thought=True)
        text = delta.get("content") or ""
        trace = (choice.get("entropic") or {}).get("trace") or {}
        texts, entropies = trace.get("text", ()), trace.get("entropy", ())
        if text and "".join(texts) == text and len(texts) == len(entropies):
            yield from map(Piece, texts, entropies)
        elif text:
            known = [entropy for entropy in entropies if entropy is not None]
            yield Piece(text, sum(known) / len(known) if known else None)
        if reason := choice.get("finish_reason"):
            yield Piece("", finish_reason=reason)


def error_message(content: bytes) -> str:
    """The message in the body of an error, in OpenAI's form or any other."""
    try:
        tree = json.loads(content)
    except ValueError:
        return content.decode("utf-8", "replace")[:500]
    error = tree.get("error", tree) if isinstance(tree, dict) else tree
    return str(error.get("message", error) if isinstance(error, dict) else error)[:500]
