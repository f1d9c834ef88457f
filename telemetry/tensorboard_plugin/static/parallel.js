// Parallel coordinates: hyperparameters and losses of runs, a line for each run.

import { fitText, line, prepare, setText } from "./canvas.js";
import { isLog } from "./curves.js";
import { element } from "./dom.js";
import { formatNumber } from "./format.js";
import { cssColor } from "./scale.js";

const HEIGHT = 190;
const [LEFT, TOP, BOTTOM] = [60, 36, 20];
const REACH = 16; // pixels on both sides of an axis in which a drag begins
const MOST_NAMES = 8;
const GAP = 88; // pixels between axes at least: room for the ends of their ranges

export class Parallel {
  /** @param {() => void} onBrush when a range on an axis has changed */
  constructor(onBrush) {
    this.ranges = new Map();
    this.canvas = element("canvas", { role: "img" });
    const scroll = element("div", { class: "parallel-scroll" }, this.canvas);
    const summary = element("summary", {}, "Hyperparameters and results of these runs");
    const help = element("p", { class: "muted" }, "Drag along an axis to filter, click to clear. Dotted: the run has no value on the axis in between.");
    this.node = element("details", { class: "below-runs parallel" }, summary, scroll, help);
    this.node.addEventListener("toggle", () => this.draw());
    const at = ({ offsetY }) => Math.min(Math.max(1 - (offsetY - TOP) / (HEIGHT - TOP - BOTTOM), 0), 1);
    this.canvas.onpointerdown = (event) => {
      this.dragged = this.axes?.find(({ x }) => Math.abs(x - event.offsetX) < REACH);
      if (!this.dragged) return;
      this.canvas.setPointerCapture(event.pointerId);
      this.from = at(event);
      this.ranges.delete(this.dragged.title);
      this.draw();
    };
    this.canvas.onpointermove = (event) => {
      if (!this.dragged || Math.abs(at(event) - this.from) < 0.02) return;
      this.ranges.set(this.dragged.title, [this.from, at(event)].sort((a, b) => a - b));
      this.draw();
    };
    this.canvas.onpointerup = () => {
      if (this.dragged) onBrush(); // not before: the table shrinks, and all would move
      this.dragged = null;
    };
  }

  /**
   * @param {Object[]} runs that match the filter
   * @param {Object[]} columns of the table that are drawn: `title`, `key`; the last one gives colors
   * @param {Object} theme
   */
  show(runs, columns, theme) {
    this.axes = columns.map(({ title, key }) => ({ title, key, ...axisOf(runs.map(key)) }));
    Object.assign(this, { runs, theme });
    this.node.hidden = columns.length < 2 || runs.length < 2;
    this.draw();
  }

  /** Whether a run is within all ranges. */
  accepts(run) {
    return (this.axes ?? []).every(({ title, key, placeOf }) => {
      const [low, high] = this.ranges.get(title) ?? [-Infinity, Infinity];
      const place = placeOf(key(run));
      return !this.ranges.has(title) || (place !== null && place >= low && place <= high);
    });
  }

  draw() {
    if (!this.node.open || this.node.hidden) return;
    const { axes, theme } = this;
    const width = Math.max(this.node.clientWidth - 32, 2 * LEFT + (axes.length - 1) * GAP);
    const context = prepare(this.canvas, width, HEIGHT);
    const gap = (width - 2 * LEFT) / (axes.length - 1);
    axes.forEach((axis, i) => (axis.x = LEFT + i * gap));
    const yOf = (place) => HEIGHT - BOTTOM - place * (HEIGHT - TOP - BOTTOM);
    const [faint, bright] = [false, true].map((is) => this.runs.filter((run) => this.accepts(run) === is));
    const colors = axes[axes.length - 1];
    for (const run of [...faint, ...bright]) {
      const place = colors.placeOf(colors.key(run));
      context.globalAlpha = bright.includes(run) ? 0.9 : 0.12;
      context.strokeStyle = context.fillStyle = place === null ? theme.nan : cssColor(false, place);
      context.lineWidth = 1.5;
      const places = axes.map(({ key, placeOf }) => placeOf(key(run)));
      const known = [...places.keys()].filter((i) => places[i] !== null);
      known.forEach((i, n) => {
        const [x, y] = [axes[i].x, yOf(places[i])];
        const before = known[n - 1];
        if (n) {
          // Dashed past the axes on which the run has no value.
          context.setLineDash(before === i - 1 ? [] : [2, 4]);
          line(context, axes[before].x, yOf(places[before]), x, y);
        }
        context.fillRect(x - 2, y - 2, 4, 4);
      });
      context.setLineDash([]);
      if (!known.length) continue;
      const last = known.at(-1);
      context.fillStyle = run.alert && !run.alert.resolved ? theme[run.alert.severity] : context.strokeStyle;
      context.fillRect(axes[last].x - 3, yOf(places[last]) - 3, 6, 6);
    }
    context.globalAlpha = 1;
    for (const axis of axes) this.#drawAxis(context, axis, Math.min(gap, 2 * LEFT) - 8, yOf);
    this.canvas.setAttribute("aria-label", `${axes.map(({ title }) => title).join(", ")} of ${this.runs.length} runs`);
  }

  #drawAxis(context, { title, x, ticks }, room, yOf) {
    const { theme } = this;
    setText(context, theme, "center", "bottom");
    context.strokeStyle = context.fillStyle = theme.text;
    context.lineWidth = 1;
    line(context, x, yOf(1), x, yOf(0));
    this.#label(fitText(context, title, room), x, yOf(1) - 16);
    context.fillStyle = theme.muted;
    context.textBaseline = "middle";
    for (const { place, text } of ticks) {
      const outside = place === 1 ? -8 : place === 0 ? 9 : 0;
      this.#label(fitText(context, text, room), x, yOf(place) + outside);
    }
    const range = this.ranges.get(title);
    if (!range) return;
    context.fillStyle = theme.accent;
    context.globalAlpha = 0.35;
    context.fillRect(x - 6, yOf(range[1]), 12, yOf(range[0]) - yOf(range[1]));
    context.globalAlpha = 1;
  }

  /** A text with a rim of the background, which lines behind it do not cross. */
  #label(text, x, y) {
    const context = this.canvas.getContext("2d");
    context.lineWidth = 4;
    context.strokeStyle = this.theme.background;
    context.strokeText(text, x, y);
    context.fillText(text, x, y);
  }
}

/** Places of values on an axis, 0 to 1, or null; and the labels of its ends or names. */
function axisOf(values) {
  const known = values.filter((value) => value != null);
  if (!known.every((value) => typeof value === "number")) {
    const names = [...new Set(known.map(String))].sort();
    const place = (name) => (names.length > 1 ? names.indexOf(name) / (names.length - 1) : 0.5);
    const few = names.length > MOST_NAMES ? [names[0], names.at(-1)] : names;
    const ticks = few.map((text) => ({ place: place(text), text }));
    return { placeOf: (value) => (value == null ? null : place(String(value))), ticks };
  }
  const finite = known.filter(Number.isFinite);
  const scaled = isLog([{ values: finite }]) && Math.min(...finite) > 0 ? Math.log : Number;
  const [least, most] = [Math.min(...finite), Math.max(...finite)];
  const span = scaled(most) - scaled(least);
  const placeOf = (value) => {
    if (!Number.isFinite(value)) return null;
    return span > 0 ? (scaled(value) - scaled(least)) / span : 0.5;
  };
  const ends = span > 0 ? [least, most] : [least];
  const ticks = finite.length ? ends.map((end) => ({ place: placeOf(end), text: formatNumber(end) })) : [];
  return { placeOf, ticks };
}
