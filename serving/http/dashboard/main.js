// Puts the page together: the form, one run or two side by side, a conversation, and what to do when the server says no.

import { InFlight } from "./in_flight.js";
import { Plots } from "./plots.js";
import { Refusal, complete, get, hasLaw } from "./stream.js";
import { Card, Pane, legend } from "./text.js";
import { verdict } from "./verdict.js";

// As PRESET_TABLE of entropic_jax has them.
const PRESETS = {
  off: "Plain decoding.",
  micro: "Temperature lowered where the sampled entropy H_T is above its target.",
  meso: "Tokens drafted and verified: the text of off in fewer passes.",
  macro: "Sequences scheduled by the drop expected of their belief entropy H.",
  full: "Micro, meso and macro: the text of micro.",
  "meso-lossy": "Pages left unread, up to a fixed attention mass ε; the text changes.",
  "full-lossy": "Micro, meso-lossy and macro.",
};
// It repeats itself, so that drafts are accepted.
const PROMPT = `class Settings:
    """Settings of a server."""

    def set_host(self, host):
        """Set the host."""
        self._host = host
        return self

    def set_port(self, port):
        """Set the port."""
        self._port = port
        return self

    def set_timeout(self, timeout):
`;

const $ = (id) => document.getElementById(id);
const plots = new Plots($("plots"));
const card = new Card($("token-card"));
const page = { model: "", target: null, running: null, chosen: false, messages: [], prompt: PROMPT, reversed: false };

function presets() {
  for (const name of Object.keys(PRESETS)) {
    const input = Object.assign(document.createElement("input"), { type: "radio", name: "preset", value: name, checked: name === "meso" });
    const word = Object.assign(document.createElement("span"), { textContent: name });
    const label = document.createElement("label");
    label.append(input, word);
    $("presets").append(label);
    input.addEventListener("change", () => {
      page.chosen = true;
      hint();
    });
  }
  hint();
}

const chosen = () => document.querySelector("input[name=preset]:checked").value;
const chatting = () => document.querySelector("input[name=mode]:checked").value === "chat";

function hint() {
  $("preset-hint").textContent = PRESETS[chosen()];
  $("compare").disabled = page.running !== null || chosen() === "off";
  $("target").disabled = !hasLaw(chosen());
}

/** Between text and chat: the box keeps the prompt of one while it holds the message of the other. */
function mode() {
  const chat = chatting(), box = $("prompt");
  $("prompt-label").textContent = chat ? "Message" : "Prompt";
  $("compare").hidden = chat;
  [box.value, page.prompt] = [page.prompt ?? "", box.value];
  converse();
}

/** Show the conversation so far. */
function converse() {
  $("conversation").hidden = !chatting() || !page.messages.length;
  $("clear").hidden = !chatting() || !page.messages.length || page.running !== null;
  $("conversation").replaceChildren(...page.messages.map(({ role, content }) => {
    const item = document.createElement("li"), who = document.createElement("b");
    who.textContent = role;
    item.append(who, content);
    return item;
  }));
  $("conversation").scrollTop = $("conversation").scrollHeight;
}

/** What the form asks for; the prompt and the seed are the same for every preset. */
function request(preset) {
  const target = $("target").value;
  return {
    model: page.model, preset,
    ...(chatting() ? { messages: [...page.messages] } : { prompt: $("prompt").value }),
    max_tokens: Number($("max-tokens").value), temperature: Number($("temperature").value),
    seed: Number($("seed").value), target: target === "" ? null : Number(target),
  };
}

async function runPane(pane, series, requested, signal) {
  const start = performance.now();
  const each = (tokens) => {
    const seconds = (performance.now() - start) / 1000;
    for (const token of tokens) {
      plots.add(series, pane.count, seconds, token);
      pane.entropy = (pane.entropy ?? 0) + (token.entropy ?? 0);
      pane.tau = token.entropic_time ?? pane.tau;
      pane.drafted = (pane.drafted ?? 0) + (token.from_draft ? 1 : 0);
      pane.count += 1;
    }
    pane.add(tokens);
    const rate = pane.count / Math.max(seconds, 1e-3);
    pane.figures.textContent = `${pane.count} tokens · ${rate.toFixed(0)}/s` + (pane.drafted ? ` · ${pane.drafted} from drafts` : "");
  };
  try {
    const end = await complete(requested, { key: $("key").value, signal, each });
    return { ...end, seconds: (performance.now() - start) / 1000 };
  } finally {
    pane.end();
  }
}

async function run(names) {
  stop();
  if (!$("form").reportValidity()) return null;
  const controller = new AbortController();
  page.running = controller;
  quiet();
  show(true);
  $("text-hint").hidden = false;
  const colors = names.length > 1 ? ["other", "accent"] : ["accent"];
  const target = $("target").value === "" ? page.target : Number($("target").value);
  plots.reset(names.map((name, i) => ({ name, color: colors[i] })), names.some(hasLaw) ? target : null);
  const panes = names.map((title, i) => new Pane({
    title, card, other: colors[i] === "other", onToken: (index) => plots.mark(i, index),
  }));
  $("panes").replaceChildren(...panes.map((pane) => pane.node));
  const tail = chatting() ? "" : $("prompt").value.split("\n").slice(-8).join("\n");
  panes.forEach((pane) => {
    pane.count = 0;
    pane.begin(tail);
  });
  $("said").textContent = "Running.";
  $("verdict").hidden = true;
  if (matchMedia("(max-width: 900px)").matches) $("output").scrollIntoView({ block: "start" });
  try {
    const ends = []; // one after the other, each without cached prefixes: seconds are compared
    const order = [...names.keys()];
    if (names.length > 1) {
      if (page.reversed) order.reverse(); // whatever favours the first or the second favours each in turn
      page.reversed = !page.reversed;
    }
    for (const i of order) {
      const salt = names.length > 1 ? crypto.getRandomValues(new Uint32Array(2)).join("-") : null;
      ends[i] = await runPane(panes[i], i, { ...request(names[i]), salt }, controller.signal);
    }
    $("said").textContent = ends.map((end, i) => said(names[i], panes[i], end)).join(" ");
    if (names.length > 1) {
      verdict($("verdict"), names.map((name, i) => ({ name, tokens: panes[i].tokens, ...ends[i] })), names[order[0]]);
    }
  } catch (error) {
    panes.forEach((pane) => pane.end());
    if (error.name === "AbortError") $("said").textContent = "Stopped.";
    else complain(error, names);
  } finally {
    plots.end();
    if (page.running === controller) {
      page.running = null;
      show(false);
    }
  }
  return panes.at(-1);
}

/** Send the message; the answer joins the conversation, and a message without any answer goes back to its box. */
async function send() {
  const content = $("prompt").value;
  if (!content.trim() || !$("form").reportValidity()) return;
  page.messages.push({ role: "user", content });
  $("prompt").value = "";
  converse();
  const pane = await run([chosen()]);
  const answer = pane?.tokens.map((token) => token.text).join("") ?? "";
  if (answer) {
    page.messages.push({ role: "assistant", content: answer });
  } else {
    page.messages.pop();
    $("prompt").value ||= content;
  }
  converse();
}

function said(name, pane, end) {
  const reason = { length: "at the limit of tokens", stop: "at the end of the text" }[end.reason] ?? `(${end.reason})`;
  const mean = pane.count ? (pane.entropy / pane.count).toFixed(2) : "–";
  const tau = Number.isFinite(pane.tau) ? `, entropic time ${pane.tau.toFixed(1)}` : "";
  return `${name}: ended ${reason} after ${pane.count} tokens in ${end.seconds.toFixed(1)} s; mean belief entropy H ${mean}${tau} nats.`;
}

function stop() {
  page.running?.abort();
}

function show(running) {
  $("stop").hidden = !running;
  document.body.classList.toggle("running", running);
  $("run").disabled = running;
  $("run").hidden = $("compare").hidden = running && matchMedia("(max-width: 900px)").matches;
  if (!running && chatting()) $("compare").hidden = true;
  for (const input of document.querySelectorAll("input[name=mode]")) input.disabled = running;
  hint();
  if (running && document.activeElement === $("run")) $("stop").focus();
}

function quiet() {
  clearInterval(page.countdown);
  $("alert").hidden = true;
  $("alert").replaceChildren();
}

/** Say what went wrong, and what to do about it. */
function complain(error, names) {
  const box = $("alert"), words = document.createElement("span");
  const refused = error instanceof Refusal ? error : new Refusal("failed", String(error));
  $("said").textContent = "";
  words.textContent = refused.message;
  box.replaceChildren(words);
  box.hidden = false;
  if (refused.kind === "key") return askForKey();
  if (refused.kind === "wrong") return undefined;
  const again = Object.assign(document.createElement("button"), { type: "button", textContent: "Try again" });
  again.addEventListener("click", () => (chatting() ? send() : run(names)));
  box.append(again);
  if (refused.kind === "busy") {
    let left = Math.ceil(refused.retryAfter);
    const count = () => {
      again.textContent = left > 0 ? `Try again in ${left} s` : "Try again";
      if (left-- <= 0) clearInterval(page.countdown);
    };
    count();
    page.countdown = setInterval(count, 1000);
  }
  return undefined;
}

function askForKey() {
  if ($("key-row").hidden) {
    $("key-row").hidden = false;
    $("key").focus();
  }
}

function start() {
  presets();
  legend($("legend"));
  plots.reset([{ name: "meso", color: "accent" }], null);
  $("prompt").value = PROMPT;
  page.prompt = "";
  for (const input of document.querySelectorAll("input[name=mode]")) input.addEventListener("change", mode);
  $("clear").addEventListener("click", () => {
    page.messages = [];
    $("panes").replaceChildren();
    $("said").textContent = "";
    converse();
    $("prompt").focus();
  });
  $("key").value = sessionStorage.getItem("entropic-key") ?? "";
  $("key").addEventListener("change", () => sessionStorage.setItem("entropic-key", $("key").value));
  $("form").addEventListener("submit", (event) => {
    event.preventDefault();
    if (chatting()) send();
    else run([chosen()]);
  });
  $("compare").addEventListener("click", () => run(["off", chosen()]));
  $("stop").addEventListener("click", stop);
  document.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey) && !page.running) $("form").requestSubmit();
    if (event.key === "Escape") {
      card.hide();
      stop();
    }
  });
  const inFlight = new InFlight({
    body: $("in-flight"), figures: $("in-flight-figures"), dot: document.querySelector(".dot"), words: $("health-text"),
    key: () => $("key").value,
    onKey: askForKey,
    onState: (state) => {
      page.target = state.target_entropy ?? null;
      for (const input of document.querySelectorAll("input[name=preset]")) {
        input.disabled = state.presets ? !state.presets.includes(input.value) : false;
        if (!page.chosen && input.value === state.preset) input.checked = true;
      }
      hint();
      if (page.target != null) $("target").placeholder = `auto: ${page.target.toFixed(2)}`;
      if (state.max_model_len) $("max-tokens").max = state.max_model_len;
      if (state.model && state.model !== page.model) name(state.model);
    },
  });
  inFlight.look();
  get("v1/models", $("key").value).then((tree) => name(tree.data?.[0]?.id ?? ""), () => {});
}

function name(model) {
  page.model = model;
  $("model").textContent = model;
}

start();
