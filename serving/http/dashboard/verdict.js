// What a comparison of two runs came to: are the tokens equal, and what did each take.

const fixed = (value, digits) => (Number.isFinite(value) ? value.toFixed(digits) : "–");

function row(kind, values) {
  const tr = document.createElement("tr");
  tr.append(...values.map((value) => Object.assign(document.createElement(kind), { textContent: value })));
  return tr;
}

/** The index of the first token in which two texts differ, or -1. */
export function firstDifference(first, second) {
  const id = (token) => token?.token_ids ?? token?.text;
  const length = Math.max(first.length, second.length);
  for (let i = 0; i < length; i++) if (id(first[i]) !== id(second[i])) return i;
  return -1;
}

/**
 * Fill `place` with the verdict on two runs { name, tokens, seconds, summary }; the first is the one compared with, and
 * `earlier` names the one that ran before the other. One pair says little: other work on the machine changes its seconds.
 */
export function verdict(place, runs, earlier) {
  const [before, after] = runs, at = firstDifference(before.tokens, after.tokens);
  const equal = at < 0 ? `The tokens are equal, all ${after.tokens.length}.` : `The tokens differ from token ${at + 1} on.`;
  const speed = `In this one run, ${earlier} first, ${after.name} took ${fixed(after.seconds / before.seconds, 2)} times the seconds of ${before.name}.`;
  const words = Object.assign(document.createElement("strong"), { textContent: `${equal} ${speed}` });
  const table = document.createElement("table");
  table.append(row("th", ["preset", "tokens", "seconds", "passes", "cost C, s"]), ...runs.map(({ name, tokens, seconds, summary }) =>
    row("td", [name, String(tokens.length), fixed(seconds, 2), fixed(summary.passes, 0), fixed(summary.cost, 4)])));
  place.replaceChildren(words, table);
  place.hidden = false;
}
