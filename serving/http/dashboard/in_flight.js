// What the server says of itself once a second while anyone looks: is it well, and what is in flight.

import { get } from "./stream.js";

const cell = (text, className = "") => Object.assign(document.createElement("td"), { textContent: text, className });
const fixed = (value, digits) => (Number.isFinite(value) ? value.toFixed(digits) : "–");

export class InFlight {
  /** `onState` gets each answer of the server, `onKey` is called where it wants an API key. */
  constructor({ body, figures, dot, words, key, onState, onKey }) {
    Object.assign(this, { body, figures, dot, words, key, onState, onKey });
    document.addEventListener("visibilitychange", () => document.hidden || this.look());
  }

  async look() {
    clearTimeout(this.timer);
    try {
      const state = await get("entropic/state", this.key());
      this.#draw(state);
      this.onState(state);
      this.#say(state.ready === false ? "warn" : "good", state.ready === false ? "warming up" : "ready");
    } catch (error) {
      if (error.kind === "key") this.onKey();
      this.#say("bad", { gone: "no answer", key: "wants an API key", busy: "busy" }[error.kind] ?? "trouble");
    }
    if (!document.hidden) this.timer = setTimeout(() => this.look(), 1000);
  }

  #say(color, words) {
    this.dot.className = `dot ${color}`;
    if (this.words.textContent !== words) this.words.textContent = words;
  }

  #draw(state) {
    const sequences = [...(state.sequences ?? [])].sort((a, b) => (b.priority ?? 0) - (a.priority ?? 0));
    const most = Math.max(1e-9, ...sequences.map((sequence) => sequence.priority ?? 0));
    const usage = Number.isFinite(state.kv_usage) ? ` · ${(100 * state.kv_usage).toFixed(0)} % of the cache` : "";
    this.figures.textContent = `${state.running ?? 0} running · ${state.waiting ?? 0} waiting${usage}`;
    const rows = sequences.map((sequence) => {
      const row = document.createElement("tr");
      const priority = cell(fixed(sequence.priority, 2));
      const meter = Object.assign(document.createElement("meter"), { min: 0, max: most, value: sequence.priority ?? 0 });
      meter.setAttribute("aria-hidden", "true");
      priority.append(meter);
      row.append(
        cell(String(sequence.id).slice(-8)), priority, cell(sequence.state ?? ""),
        cell(`${sequence.prompt_tokens ?? "–"} + ${sequence.tokens ?? 0}`),
        cell(fixed(sequence.entropy, 2)), cell(fixed(sequence.entropic_time, 1)),
        cell(`${fixed(sequence.waited, 1)} s`));
      return row;
    });
    if (!rows.length) {
      const none = cell("Nothing is in flight.", "none");
      none.colSpan = 7;
      rows.push(document.createElement("tr"));
      rows[0].append(none);
    }
    this.body.replaceChildren(...rows);
  }
}
