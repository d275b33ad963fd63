"""Settings of a server: its address, API keys, limits and default control."""

from typing import Literal, NamedTuple

from ..options.control_options import Control
from .rate_limit import RateLimit

MOST_TEXTS = 65536  # the largest limit on the texts of a request
OnEngineFailure = Literal["exit", "restart", "stay"]


class Limits(NamedTuple):
    """Limits of one request, and of connections."""

    body: int = 16 * 2**20  # bytes
    sequences: int = 1024  # prompts times texts for each
    stops: int = 64  # stop strings, as many as the Python API accepts
    grammar: int = 64 * 1024  # characters of a schema, expression or grammar
    connections: int = 2048  # open at once
    head: float = 20.0  # seconds that the headers of a request may take
    tokenize: int = 2**20  # characters or tokens of a text at /tokenize and /detokenize
    stored_responses: int = 4096  # responses of /v1/responses
    stored_response_bytes: int = 64 * 2**20  # of all stored responses
    stored_response_seconds: float = 3600.0  # that a stored response lives
    file_bytes: int = 2**30  # of all files of /v1/files
    file_seconds: float = 30 * 86400.0  # that a file lives which states no other time
    rate: RateLimit | None = None  # of the POST requests of an API key, or of an address without keys


class Settings(NamedTuple):
    """Settings of the server from the command line, without those of the engine."""

    host: str = "127.0.0.1"
    port: int = 8000
    uds: str | None = None  # path of a Unix socket to listen on instead
    ssl_certfile: str | None = None  # PEM files; with a certificate, the server speaks HTTPS
    ssl_keyfile: str | None = None
    api_keys: tuple[str, ...] = ()
    share_prefix_cache: bool = False  # whether requests with different API keys share cached prefixes
    allowed_hosts: tuple[str, ...] = ()  # of the header Host; on a loopback address, in addition to its own
    root_path: str = ""
    allowed_origins: tuple[str, ...] = ()
    log_requests: bool = True
    request_timeout: float | None = 600.0  # seconds
    drain: float = 30.0  # seconds after SIGTERM in which requests may end, and the process does
    on_engine_failure: OnEngineFailure = "exit"
    tool_call_parser: str | None = None  # format of tool calls; None is that of the chat template
    reasoning_parser: str | None = None  # "think" or "none"; None follows the chat template
    metrics_prefix: str = "vllm"
    profile_dir: str | None = None  # where /start_profile writes; None: there are no such routes
    lora_dir: str | None = None  # below which adapters may be loaded; None: there are no such routes
    sleep_mode: bool = False  # whether there are the routes /sleep, /wake_up and /is_sleeping
    files_dir: str | None = None  # of /v1/files and /v1/batches; None: there are no such routes
    control: Control = Control()
    limits: Limits = Limits()

    def __repr__(self) -> str:
        """Without the keys."""
        shown = {**self._asdict(), "api_keys": f"<{len(self.api_keys)}>"}
        return f"Settings({', '.join(f'{name}={value!r}' for name, value in shown.items())})"
