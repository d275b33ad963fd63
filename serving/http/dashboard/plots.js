// Four small plots on canvas; drawn at most once a frame, in the colours of the page.

const MEMORY = 6; // tokens that the running mean of the entropy remembers
const ROOM = { right: 8, top: 8, bottom: 20 }; // the labels on the left take what they need

/** A round number of which about `count` steps span `range`. */
function stepOf(range, count) {
  const raw = range / count, power = 10 ** Math.floor(Math.log10(raw));
  return [1, 2, 5, 10].find((n) => n * power >= raw) * power;
}

/** One plot of lines over tokens or seconds. A series is { x: [], y: [], color, faint }. */
class Plot {
  constructor({ title, unit, across, most = null, digits = 2 }) {
    Object.assign(this, { title, unit, across, most, digits, series: [], level: null, cursor: null });
    this.canvas = document.createElement("canvas");
    this.canvas.setAttribute("role", "img");
    this.now = document.createElement("output");
    const caption = document.createElement("figcaption");
    const [words, below] = title.split("_");
    const name = Object.assign(document.createElement("span"), { textContent: words });
    if (below) name.append(Object.assign(document.createElement("sub"), { textContent: below }));
    caption.append(name, this.now);
    this.node = Object.assign(document.createElement("figure"), { className: "card" });
    this.node.append(caption, this.canvas);
    new ResizeObserver(() => this.touch()).observe(this.canvas);
    this.describe();
  }

  reset(series) {
    this.series = series;
    this.cursor = null;
    this.now.value = "";
    this.touch();
  }

  push(index, x, y) {
    if (!Number.isFinite(y)) return;
    const series = this.series[index];
    series.x.push(x);
    series.y.push(y);
    if (!series.faint && series.color === "accent") this.now.value = `${y.toFixed(this.digits)}${this.unit}`;
    this.touch();
  }

  /** Say in words what is drawn. */
  describe() {
    const target = this.level == null ? "" : `, target ${this.level.toFixed(2)}`;
    const spoken = this.series.filter((s) => !s.faint && s.y.length).map((s) => {
      const mean = s.y.reduce((a, b) => a + b, 0) / s.y.length;
      return `${s.name}: ${s.y.length} tokens, mean ${mean.toFixed(2)}, last ${s.y.at(-1).toFixed(2)}`;
    });
    this.canvas.setAttribute("aria-label", `${this.title}${target}. ${spoken.join("; ") || "Nothing measured yet."}`);
  }

  touch() {
    if (this.pending) return;
    this.pending = true;
    requestAnimationFrame(() => {
      this.pending = false;
      this.draw();
    });
  }

  draw() {
    const ratio = devicePixelRatio || 1, width = this.canvas.clientWidth, height = this.canvas.clientHeight;
    if (!width) return;
    if (this.canvas.width !== Math.round(width * ratio)) this.canvas.width = Math.round(width * ratio);
    if (this.canvas.height !== Math.round(height * ratio)) this.canvas.height = Math.round(height * ratio);
    const brush = this.canvas.getContext("2d"), style = getComputedStyle(this.canvas);
    const color = (name) => style.getPropertyValue(`--${name}`).trim();
    brush.setTransform(ratio, 0, 0, ratio, 0, 0);
    brush.clearRect(0, 0, width, height);
    const xs = this.series.flatMap((s) => s.x.slice(-1)), ys = this.series.flatMap((s) => s.y);
    const right = Math.max(this.across === "s" ? 0.1 : 20, ...xs);
    const top = this.most ?? (Math.max(this.level ?? 0, ys.reduce((a, b) => Math.max(a, b), 0)) || 1) * 1.08;
    brush.font = `10.5px ${style.fontFamily}`;
    const ticks = [];
    for (let step = stepOf(top, 3), y = 0; y <= top * 1.001; y += step) ticks.push([y, String(+y.toPrecision(4))]);
    const left = 10 + Math.max(...ticks.map(([, label]) => brush.measureText(label).width));
    const above = this.level == null ? ROOM.top : 16; // the label of the level stands there
    const inner = { w: width - left - ROOM.right, h: height - above - ROOM.bottom };
    const px = (x) => left + (x / right) * inner.w, py = (y) => above + (1 - Math.min(y, top) / top) * inner.h;

    brush.fillStyle = color("quiet");
    brush.strokeStyle = color("line");
    brush.lineWidth = 1;
    brush.textAlign = "right";
    brush.textBaseline = "middle";
    for (const [y, label] of ticks) {
      brush.beginPath();
      brush.moveTo(left, Math.round(py(y)) + 0.5);
      brush.lineTo(width - ROOM.right, Math.round(py(y)) + 0.5);
      brush.stroke();
      brush.fillText(label, left - 6, py(y));
    }
    brush.textBaseline = "alphabetic";
    brush.textAlign = "center";
    for (let step = stepOf(right, 4), x = step; x <= right * 1.001; x += step) brush.fillText(String(+x.toFixed(2)), Math.min(px(x), width - 14), height - 5);
    brush.textAlign = "left";
    brush.fillText(this.across, 4, height - 5);

    const level = () => {
      brush.setLineDash([4, 4]);
      brush.strokeStyle = color("warn");
      brush.beginPath();
      brush.moveTo(left, py(this.level));
      brush.lineTo(width - ROOM.right, py(this.level));
      brush.stroke();
      brush.setLineDash([]);
      brush.fillStyle = color("warn");
      brush.textAlign = "right";
      brush.fillText(`target ${this.level.toFixed(2)}`, width - ROOM.right, 10); // above the curves
    };
    for (const { x, y, color: name, faint } of this.series) {
      brush.strokeStyle = color(name);
      brush.globalAlpha = faint ? 0.35 : 1;
      brush.lineWidth = faint ? 1 : 1.6;
      brush.lineJoin = "round";
      brush.beginPath();
      // More points than pixels would only cost time.
      const every = Math.max(1, Math.floor(x.length / (2 * width)));
      for (let i = 0; i < x.length; i += every) brush[i ? "lineTo" : "moveTo"](px(x[i]), py(y[i]));
      brush.stroke();
    }
    brush.globalAlpha = 1;
    if (this.level != null) level();
    if (this.cursor) {
      const series = this.series[this.cursor.series], i = this.cursor.index;
      if (series && i < series.x.length) {
        brush.fillStyle = color(series.color);
        brush.beginPath();
        brush.arc(px(series.x[i]), py(series.y[i]), 3.5, 0, 7);
        brush.fill();
      }
    }
  }
}

/** The four plots of a run: running mean of the sampled entropy H_T (and, faint, each token's), T, kept, τ. */
export class Plots {
  constructor(place) {
    this.entropy = new Plot({ title: "Sampled entropy H_T", unit: "", across: "token" });
    this.temperature = new Plot({ title: "Temperature T", unit: "", across: "token" });
    this.kept = new Plot({ title: "Pages kept", unit: " %", across: "token", most: 105, digits: 0 });
    this.time = new Plot({ title: "Entropic time τ", unit: "", across: "s", digits: 1 });
    this.all = [this.entropy, this.temperature, this.kept, this.time];
    place.append(...this.all.map((plot) => plot.node));
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.all.forEach((plot) => plot.touch()));
  }

  /** Begin anew with series `{ name, color }`; `target` is a line in the plot of the entropy, or null. */
  reset(series, target) {
    const lines = (faint = false, drawn = series) => drawn.map(({ name, color }) => ({ name, color, faint, x: [], y: [] }));
    this.count = series.length;
    this.entropy.level = target;
    this.entropy.reset([...lines(), ...lines(true, series.slice(-1))]);
    for (const plot of this.all.slice(1)) plot.reset(lines());
    this.all.forEach((plot) => plot.describe());
  }

  add(series, index, seconds, token) {
    const sampled = token.tempered_entropy ?? token.entropy;
    const before = this.entropy.series[series].y.at(-1) ?? sampled;
    this.entropy.push(series, index, before + (sampled - before) / MEMORY);
    if (series === this.count - 1) this.entropy.push(this.count, index, sampled);
    this.temperature.push(series, index, token.temperature);
    this.kept.push(series, index, 100 * (token.kept_fraction ?? NaN));
    this.time.push(series, seconds, token.entropic_time);
  }

  mark(series, index) {
    for (const plot of this.all) {
      plot.cursor = index == null ? null : { series, index };
      plot.touch();
    }
  }

  end() {
    this.all.forEach((plot) => plot.describe());
  }
}
