"""A server for the dashboard tests: the page under its strict policy, and scripted answers."""

import json
import math
import re
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from entropic_jax import serving

FOLDER = Path(serving.__file__).parent / "http" / "dashboard"
TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
# The strictest under which the page must work.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
TEXT = (
    "    path = Path(path)\n    if not path.exists():\n        raise FileNotFoundError(path)\n"
    '    with path.open(encoding="utf-8") as file:\n        config = json.load(file)\n'
    '    for name in ("model", "seed"):\n        if name not in config:\n'
    '            raise KeyError(f"{path} has no {name}")\n    return config\n'
)
TOKENS = re.findall(r"\n *| ?\w+|[^\w\s]+| +", TEXT)


def entropy(i: int) -> float:
    """Entropy of token i, between 0 and 5 nats, varying from token to token."""
    return round(abs(2.2 * math.sin(i * 0.9) + 1.6 * math.sin(i * 0.23)) ** 1.3, 3)


class DashboardServer(ThreadingHTTPServer):
    """`refuse` is (status, headers, message) for completions; `gap` the seconds between two chunks."""

    daemon_threads = True
    target = 1.35

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}/"
        self.requests: list[dict] = []
        self.refuse, self.key, self.gap, self.broken_off = None, None, 0.0, 0
        self.cut_off, self.differs_at = False, None

    def __enter__(self):
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_) -> None:
        self.shutdown()
        self.server_close()


class Handler(BaseHTTPRequestHandler):
    server: DashboardServer

    def log_message(self, *_) -> None:
        pass

    def _send(self, status: int, data: bytes, kind: str, **headers: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Content-Security-Policy", POLICY)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(data)

    def _json(self, status: int, tree, **headers: str) -> None:
        self._send(status, json.dumps(tree).encode(), "application/json", **headers)

    def _allowed(self) -> bool:
        if self.server.key in (None, (self.headers["Authorization"] or "").removeprefix("Bearer ")):
            return True
        self._json(401, {"error": {"message": "the API key is missing or wrong"}})
        return False

    def do_GET(self) -> None:
        path = self.path.removeprefix("/dashboard").removeprefix("/") or "index.html"
        if (FOLDER / path).is_file():
            return self._send(200, (FOLDER / path).read_bytes(), TYPES[Path(path).suffix])
        if not self._allowed():
            return None
        if self.path == "/v1/models":
            return self._json(200, {"data": [{"id": "scripted", "max_model_len": 8192}]})
        if self.path == "/entropic/state":
            names = ("decode", "decode", "prefill", "waiting")
            rows = [
                dict(
                    id=f"cmpl-{i:08x}", state=state, prompt_tokens=120 * (i + 1), tokens=17 * (4 - i),
                    priority=[0.82, 0.41, 0.2, 0.63][i], entropy=[1.1, 0.2, 0.0, 2.4][i],
                    entropic_time=[40.2, 12.5, 0, 3.1][i], waited=[0, 0.1, 0.4, 1.8][i],
                )
                for i, state in enumerate(names)
            ]  # fmt: skip
            state = dict(running=3, waiting=1, kv_usage=0.37, ready=True, sequences=rows)
            return self._json(
                200, {**state, "model": "scripted", "preset": "full", "target_entropy": self.server.target}
            )
        return self._json(404, {"error": {"message": "there is no such page"}})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not self._allowed():
            return
        self.server.requests.append(body)
        if self.server.refuse:
            status, headers, message = self.server.refuse
            self._json(status, {"error": {"message": message}}, **headers)
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        try:
            self._speak(body)
        except (BrokenPipeError, ConnectionResetError):
            self.server.broken_off += 1

    def _speak(self, body: dict) -> None:
        full, tau = body["entropic"]["preset"] == "full", 0.0
        count = min(body["max_tokens"], 3 * len(TOKENS))
        for i in range(count):
            token, high = TOKENS[i % len(TOKENS)], entropy(i)
            if full and i == self.server.differs_at:
                token = "other"
            tau += max(0.0, entropy(i - 1) - high) if i else 0.0
            trace = {
                "text": [token],
                "entropy": [high],
                "tempered_entropy": [
                    self.server.target + 0.4 * (high - self.server.target) if full else high
                ],
                "temperature": [0.8 / (1 + 0.2 * (high - self.server.target)) if full and high < 5 else 0.8],
                "kept_fraction": [0.35 + 0.1 * high if full else 1.0],
                "from_draft": [float(full and i % 3 == 1)],
                "entropic_time": [tau],
            }
            top = {token: -0.2 - high / 3, "\n": -1.9, "return": -2.5, "self": -3.0, "_": -4.2}
            logprobs = {"tokens": [token], "token_logprobs": [-0.2 - high / 3], "top_logprobs": [top]}
            if "messages" in body:
                tops = [{"token": name, "logprob": logprob} for name, logprob in top.items()]
                content = [{"token": token, "logprob": top[token], "top_logprobs": tops}]
                logprobs = {"content": content}
            self._event(
                {"text": token, "logprobs": logprobs, "entropic": {"trace": trace}, "finish_reason": None}
            )
            time.sleep(self.server.gap)
        if self.server.cut_off:
            return
        summary = {"passes": count - count // 3 if full else count, "cost": 0.002 * count}
        self._event({"text": "", "logprobs": None, "entropic": summary, "finish_reason": "length"})
        self.wfile.write(b"data: [DONE]\n\n")

    def _event(self, choice: dict) -> None:
        tree = {"object": "text_completion", "choices": [{"index": 0, **choice}]}
        self.wfile.write(f"data: {json.dumps(tree)}\n\n".encode())
        self.wfile.flush()
