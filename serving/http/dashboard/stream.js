// Requests to the server: completions as they stream, and what the server says about itself.

/** What went wrong, in words, and what can be done: `kind` is busy, key, gone, wrong or failed. */
export class Refusal extends Error {
  constructor(kind, message, retryAfter = null) {
    super(message);
    this.kind = kind;
    this.retryAfter = retryAfter;
  }
}

const headers = (key) => (key ? { Authorization: `Bearer ${key}` } : {});

async function refusal(response) {
  let message = "";
  try {
    const tree = await response.json();
    message = tree.error?.message ?? tree.detail ?? "";
  } catch { /* not JSON: the status has to do */ }
  if (typeof message !== "string") message = JSON.stringify(message);
  const after = Number(response.headers.get("Retry-After")) || null;
  if (response.status === 401 || response.status === 403) return new Refusal("key", message || "The API key is not accepted.");
  if (response.status === 429 || response.status === 503) return new Refusal("busy", message || "The server is busy.", after ?? 2);
  if (response.status < 500) return new Refusal("wrong", message || `The server refused the request (${response.status}).`);
  return new Refusal("failed", message || `The server failed (${response.status}).`);
}

async function ask(path, options) {
  try {
    return await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refusal("gone", "The server does not answer.");
  }
}

/** GET a JSON object. */
export async function get(path, key) {
  const response = await ask(path, { headers: headers(key), cache: "no-store" });
  if (!response.ok) throw await refusal(response);
  return response.json();
}

/** The events of a streamed completion, as the server sends them. */
async function* events(path, body, key, signal) {
  const response = await ask(path, {
    method: "POST", signal, headers: { "Content-Type": "application/json", ...headers(key) }, body: JSON.stringify(body),
  });
  if (!response.ok) throw await refusal(response);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "", ended = false;
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) break;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines) {
        if (!line.startsWith("data:")) continue;
        const data = line.slice(5).trim();
        if (data === "[DONE]") ended = true;
        else yield JSON.parse(data);
      }
    }
  } catch (error) {
    if (error.name === "AbortError" || error instanceof SyntaxError) throw error;
    throw new Refusal("gone", "The server went away in the middle of the text.");
  }
  if (!ended) throw new Refusal("gone", "The text broke off: the server ended the stream early.");
}

/** Names and log-probabilities in the form of text completions; those of a chat have an object for each token. */
function wordsOf(said) {
  if (!Array.isArray(said.content)) return said;
  return {
    tokens: said.content.map((token) => token.token),
    token_logprobs: said.content.map((token) => token.logprob),
    top_logprobs: said.content.map((token) => Object.fromEntries(token.top_logprobs.map((top) => [top.token, top.logprob]))),
  };
}

/** The tokens of one choice: text, log-probability, alternatives, and what was measured of each. */
function tokensOf(choice) {
  const said = wordsOf(choice.logprobs ?? {});
  const measured = choice.entropic?.trace ?? {};
  const names = said.tokens ?? measured.text ?? [];
  const texts = measured.text ?? names; // a character may take several tokens: the last of them has the text
  return texts.map((text, i) => ({
    text,
    name: names[i],
    logprob: said.token_logprobs?.[i] ?? null,
    top: said.top_logprobs?.[i] ?? {},
    ...Object.fromEntries(
      Object.entries(measured).filter(([, list]) => Array.isArray(list)).map(([key, list]) => [key, list[i] ?? null])),
  }));
}

/** Whether a preset has the temperature law, and so a target of the sampled entropy. */
export const hasLaw = (preset) => ["micro", "full", "full-lossy"].includes(preset);

/** Stream a completion, or with `messages` the answer of a chat. Calls `each` with every batch of tokens; returns why it ended and the summary. */
export async function complete(request, { key, signal, each }) {
  const { prompt, messages, max_tokens, temperature, seed, preset, target } = request;
  const entropic = { preset, trace: true, ...(hasLaw(preset) && target != null ? { target_entropy: target } : {}) };
  const body = {
    model: request.model, max_tokens, temperature, seed, entropic, stream: true, stream_options: { include_usage: true },
    ...(messages ? { messages, logprobs: true, top_logprobs: 5 } : { prompt, logprobs: 5 }),
    ...(request.salt ? { cache_salt: request.salt } : {}),
  };
  const end = { reason: null, summary: {}, usage: null };
  for await (const event of events(messages ? "v1/chat/completions" : "v1/completions", body, key, signal)) {
    if (event.error) throw new Refusal("failed", event.error.message ?? String(event.error));
    if (event.usage) end.usage = event.usage;
    if (event.entropic) Object.assign(end.summary, event.entropic);
    const choice = event.choices?.[0];
    if (!choice) continue;
    const tokens = tokensOf(choice);
    if (tokens.length) each(tokens);
    if (choice.finish_reason) {
      end.reason = choice.finish_reason;
      for (const [name, value] of Object.entries(choice.entropic ?? {})) if (typeof value === "number") end.summary[name] = value;
    }
  }
  return end;
}
