// The text, each token in the colour of its entropy, and a card that says what was measured of the one in hand.

/** Nats at and above which a token has the colour of its class; below the first it has none. */
export const SCALE = [[0.25, "e1"], [0.75, "e2"], [1.5, "e3"], [2.5, "e4"], [4, "e5"]];

const tint = (entropy) => SCALE.reduce((name, [limit, own]) => (entropy >= limit ? own : name), "");

/** Spaces and line breaks as pictures. */
export const visible = (text) => text.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replaceAll(" ", "·") || "∎";

const number = (value, digits = 2) => (Number.isFinite(value) ? value.toFixed(digits) : "–");

function element(name, properties = {}, ...children) {
  const node = Object.assign(document.createElement(name), properties);
  node.append(...children);
  return node;
}

/** What stands for a token: its colour is on its words, and on a sign for a line break, not on indentation. */
function tinted({ text, entropy }) {
  const color = tint(entropy), [, lead, rest] = /^(\s*\n\s*|)([^]*)$/.exec(text);
  const sign = lead ? "end" : text ? "" : "silent";
  const parts = sign ? [element("i", { className: `${sign} ${color}` })] : [];
  if (lead) parts.push(lead);
  if (rest) parts.push(element("span", { className: color, textContent: rest }));
  return parts;
}

/** Fill the legend of the colours. */
export function legend(place) {
  place.append("belief H, nats", element("span", { textContent: "0" }));
  for (const [limit, name] of SCALE) place.append(element("span", { className: name, textContent: String(limit) }));
  place.append(element("u", { className: "drafted", textContent: "drafted and accepted" }));
}

/** One text. Tokens are added as they come and drawn once a frame; one of them is a tab stop. */
export class Pane {
  constructor({ title, other, card, onToken }) {
    this.tokens = [];
    this.card = card;
    this.onToken = onToken;
    this.waiting = [];
    this.figures = element("small");
    this.text = element("div", { className: "text", tabIndex: -1 });
    this.text.setAttribute("role", "group");
    this.text.setAttribute("aria-label", `Text with preset ${title}; arrow keys step through its tokens`);
    const heading = element("h3", {}, element("i"), title, this.figures);
    this.node = element("div", { className: other ? "pane other" : "pane" }, heading, this.text);
    this.text.addEventListener("pointerover", (event) => this.#enter(event.target));
    this.text.addEventListener("pointerleave", () => this.#leave());
    this.text.addEventListener("focusin", (event) => this.#enter(event.target));
    this.text.addEventListener("focusout", () => this.#leave());
    this.text.addEventListener("keydown", (event) => this.#step(event));
  }

  begin(prompt) {
    this.text.classList.add("busy");
    if (prompt) this.text.append(element("span", { className: "prompt", textContent: prompt }));
  }

  add(tokens) {
    if (!this.waiting.length) requestAnimationFrame(() => this.#draw());
    this.waiting.push(...tokens);
  }

  end() {
    this.#draw();
    this.text.classList.remove("busy");
  }

  spans() {
    return this.text.getElementsByClassName("t");
  }

  #draw() {
    const follow = this.text.scrollHeight - this.text.scrollTop - this.text.clientHeight < 30;
    const first = this.tokens.length === 0;
    const fragment = document.createDocumentFragment();
    for (const token of this.waiting) {
      const span = element("span", { className: token.from_draft ? "t drafted" : "t", tabIndex: -1 }, ...tinted(token));
      span.dataset.index = this.tokens.push(token) - 1;
      fragment.append(span);
    }
    this.waiting = [];
    this.text.append(fragment);
    if (first && this.tokens.length) this.spans()[0].tabIndex = 0;
    if (follow) this.text.scrollTop = this.text.scrollHeight;
  }

  #enter(target) {
    const span = target.closest(".t");
    if (!span) return;
    const index = Number(span.dataset.index);
    this.card.show(this.tokens[index], span);
    this.onToken(index);
  }

  #leave() {
    this.card.hide();
    this.onToken(null);
  }

  #step(event) {
    const index = Number(event.target.dataset?.index);
    const spans = this.spans();
    const to = { ArrowRight: index + 1, ArrowDown: index + 1, ArrowLeft: index - 1, ArrowUp: index - 1, Home: 0, End: spans.length - 1 }[event.key];
    if (to === undefined || !spans[to]) return;
    event.preventDefault();
    event.target.tabIndex = -1;
    spans[to].tabIndex = 0;
    spans[to].focus();
  }
}

/** What was measured of one token, next to it. */
export class Card {
  constructor(node) {
    this.node = node;
  }

  show(token, span) {
    const rows = [
      ["belief entropy H", `${number(token.entropy)} nats`],
      ["sampled entropy H_T", `${number(token.tempered_entropy)} nats`],
      ["temperature T", number(token.temperature)],
      ["of the cache read", Number.isFinite(token.kept_fraction) ? `${(100 * token.kept_fraction).toFixed(0)} %` : "–"],
      ["from", token.from_draft == null ? "–" : token.from_draft ? "an accepted draft" : "a pass of its own"],
      ["probability", Number.isFinite(token.logprob) ? number(Math.exp(token.logprob), 3) : "–"],
    ];
    const list = element("dl");
    for (const [name, value] of rows) list.append(element("dt", { textContent: name }), element("dd", { textContent: value }));
    this.node.replaceChildren(element("div", { className: "what", textContent: visible(token.text) }), list);
    const others = Object.entries(token.top).sort((a, b) => b[1] - a[1]);
    if (others.length) this.node.append(element("ol", {}, ...others.map(([name, logprob]) => this.#other(name, logprob, token))));
    this.node.hidden = false;
    span.setAttribute("aria-describedby", this.node.id);
    this.#place(span.getBoundingClientRect());
  }

  hide() {
    this.node.hidden = true;
  }

  #other(name, logprob, token) {
    const probability = Math.exp(logprob);
    const bar = element("progress", { max: 1, value: probability });
    bar.setAttribute("aria-hidden", "true");
    const row = element("li", {}, element("code", { textContent: visible(name) }), bar, element("span", { textContent: number(probability, 3) }));
    row.classList.toggle("chosen", name === token.name);
    return row;
  }

  #place(at) {
    const { offsetWidth: width, offsetHeight: height } = this.node;
    const below = at.bottom + 8 + height < innerHeight;
    this.node.style.left = `${Math.max(8, Math.min(at.left, innerWidth - width - 8))}px`;
    this.node.style.top = `${below ? at.bottom + 8 : Math.max(8, at.top - height - 8)}px`;
  }
}
