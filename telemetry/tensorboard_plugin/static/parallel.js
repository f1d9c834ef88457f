// Parallel coordinates: hyperparameters and losses of runs, a line for each run.

import { fitText, line, prepare, setText } from "./canvas.js";
import { isLog } from "./curves.js";
import { formatNumber } from "./format.js";
import { DropDown } from "./parts.js";
import { html, useLayoutEffect, useRef, useState } from "./preact.js";
import { cssColor } from "./scale.js";

const HEIGHT = 190;
const [LEFT, TOP, BOTTOM] = [60, 36, 20];
const REACH = 16; // pixels on both sides of an axis in which a drag begins
const MOST_NAMES = 8;
const GAP = 88; // pixels between axes at least: room for the ends of their ranges
const WHOLE = [0, 1];

/** A test of whether a run is within the ranges of all axes. */
export function acceptorOf(columns, runs, ranges) {
  const limited = columns.filter(({ title }) => ranges.has(title));
  const tests = limited.map(({ title, key }) => {
    const { placeOf } = axisOf(runs.map(key));
    const [low, high] = ranges.get(title);
    return (run) => {
      const place = placeOf(key(run));
      return place !== null && place >= low && place <= high;
    };
  });
  return (run) => tests.every((test) => test(run));
}

/**
 * @param {Object} props `runs` that match the filter; `columns` of the table that are drawn: `title`,
 *   `key`, the last one gives colors; `ranges` by title, ends from 0 to 1; `onBrush(ranges)`; `theme`
 */
export function Parallel({ runs, columns, ranges, onBrush, theme }) {
  const canvas = useRef();
  const drag = useRef(null);
  const [isOpen, setOpen] = useState(false);
  const [dragged, setDragged] = useState(null); // ranges while one is being dragged
  const [chosen, setChosen] = useState(""); // the axis whose range the sliders set
  const axes = columns.map(({ title, key }) => ({ title, key, ...axisOf(runs.map(key)) }));
  const shown = dragged ?? ranges;
  useLayoutEffect(() => {
    if (isOpen) draw(canvas.current, axes, runs, acceptorOf(columns, runs, shown), shown, theme);
  });
  const placeAt = ({ offsetY }) => Math.min(Math.max(1 - (offsetY - TOP) / (HEIGHT - TOP - BOTTOM), 0), 1);
  const onpointerdown = (event) => {
    const at = axes.findIndex((_, i) => Math.abs(xOf(canvas.current.clientWidth, axes.length, i) - event.offsetX) < REACH);
    if (at < 0) return;
    canvas.current.setPointerCapture(event.pointerId);
    drag.current = { title: axes[at].title, from: placeAt(event) };
    setDragged(withRange(ranges, axes[at].title, null));
  };
  const onpointermove = (event) => {
    if (!drag.current || Math.abs(placeAt(event) - drag.current.from) < 0.02) return;
    const { title, from } = drag.current;
    setDragged(withRange(ranges, title, [from, placeAt(event)].sort((a, b) => a - b)));
  };
  const onpointerup = () => {
    if (drag.current) onBrush(shown); // not before: the table shrinks, and all would move
    drag.current = null;
    setDragged(null);
  };
  const { title, textAt } = axes.find((axis) => axis.title === chosen) ?? axes[0];
  const range = shown.get(title) ?? WHOLE;
  const slider = (name, end) => html`<label>${name}
    <input type="range" min="0" max="1" step="0.01" value=${range[end]} aria-label="${title} ${name}"
      aria-valuetext=${textAt(range[end])} oninput=${({ target }) => {
        const ends = range.with(end, Number(target.value)).sort((a, b) => a - b);
        onBrush(withRange(ranges, title, ends[0] > 0 || ends[1] < 1 ? ends : null));
      }} /> ${textAt(range[end])}</label>`;
  return html`<details class="below-runs parallel" ontoggle=${({ target }) => setOpen(target.open)}>
    <summary>Hyperparameters and results of these runs</summary>
    <div class="parallel-scroll">
      <canvas ref=${canvas} role="img" aria-label="${axes.map((axis) => axis.title).join(", ")} of ${runs.length} runs"
        ...${{ onpointerdown, onpointermove, onpointerup }} />
    </div>
    <p class="controls">
      <${DropDown} label="Range of" options=${axes.map((axis) => [axis.title, axis.title])} value=${title} onChoose=${setChosen} />
      ${slider("from", 0)} ${slider("to", 1)}
    </p>
    <p class="muted">Drag along an axis to filter, click to clear. Dotted: the run has no value on the axis in between.</p>
  </details>`;
}

function withRange(ranges, title, range) {
  const changed = new Map(ranges);
  if (range) changed.set(title, range);
  else changed.delete(title);
  return changed;
}

/** The place of an axis. */
function xOf(width, count, index) {
  return LEFT + (index * (width - 2 * LEFT)) / (count - 1);
}

const yOf = (place) => HEIGHT - BOTTOM - place * (HEIGHT - TOP - BOTTOM);

function draw(canvas, axes, runs, accepts, ranges, theme) {
  const width = Math.max(canvas.closest("details").clientWidth - 32, 2 * LEFT + (axes.length - 1) * GAP);
  const context = prepare(canvas, width, HEIGHT);
  const x = axes.map((_, i) => xOf(width, axes.length, i));
  const [faint, bright] = [false, true].map((isIn) => runs.filter((run) => accepts(run) === isIn));
  const colors = axes[axes.length - 1];
  for (const run of [...faint, ...bright]) {
    const place = colors.placeOf(colors.key(run));
    context.globalAlpha = accepts(run) ? 0.9 : 0.12;
    context.strokeStyle = context.fillStyle = place === null ? theme.nan : cssColor(false, place);
    context.lineWidth = 1.5;
    const places = axes.map(({ key, placeOf }) => placeOf(key(run)));
    const known = [...places.keys()].filter((i) => places[i] !== null);
    known.forEach((i, n) => {
      const before = known[n - 1];
      if (n) {
        // Dashed past the axes on which the run has no value.
        context.setLineDash(before === i - 1 ? [] : [2, 4]);
        line(context, x[before], yOf(places[before]), x[i], yOf(places[i]));
      }
      context.fillRect(x[i] - 2, yOf(places[i]) - 2, 4, 4);
    });
    context.setLineDash([]);
    if (!known.length) continue;
    const last = known.at(-1);
    context.fillStyle = run.alert && !run.alert.resolved ? theme[run.alert.severity] : context.strokeStyle;
    context.fillRect(x[last] - 3, yOf(places[last]) - 3, 6, 6);
  }
  context.globalAlpha = 1;
  axes.forEach((axis, i) => drawAxis(context, theme, axis, x[i], Math.min(x[1] - x[0], 2 * LEFT) - 8, ranges.get(axis.title)));
}

function drawAxis(context, theme, { title, ticks }, x, room, range) {
  // A text has a rim of the background, which lines behind it do not cross.
  const label = (text, y) => {
    context.lineWidth = 4;
    context.strokeStyle = theme.background;
    context.strokeText(fitText(context, text, room), x, y);
    context.fillText(fitText(context, text, room), x, y);
  };
  setText(context, theme, "center", "bottom");
  context.strokeStyle = context.fillStyle = theme.text;
  context.lineWidth = 1;
  line(context, x, yOf(1), x, yOf(0));
  label(title, yOf(1) - 16);
  context.fillStyle = theme.muted;
  context.textBaseline = "middle";
  for (const { place, text } of ticks) label(text, yOf(place) + (place === 1 ? -8 : place === 0 ? 9 : 0));
  if (!range) return;
  context.fillStyle = theme.accent;
  context.globalAlpha = 0.35;
  context.fillRect(x - 6, yOf(range[1]), 12, yOf(range[0]) - yOf(range[1]));
  context.globalAlpha = 1;
}

/** Places of values on an axis, 0 to 1, or null; the labels of its ends or names, and of any place. */
function axisOf(values) {
  const known = values.filter((value) => value != null);
  if (!known.every((value) => typeof value === "number")) {
    const names = [...new Set(known.map(String))].sort();
    const place = (name) => (names.length > 1 ? names.indexOf(name) / (names.length - 1) : 0.5);
    const few = names.length > MOST_NAMES ? [names[0], names.at(-1)] : names;
    const ticks = few.map((text) => ({ place: place(text), text }));
    const textAt = (at) => names[Math.round(at * (names.length - 1))] ?? "";
    return { placeOf: (value) => (value == null ? null : place(String(value))), ticks, textAt };
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
  const unscaled = scaled === Math.log ? Math.exp : Number;
  const textAt = (place) => (finite.length ? formatNumber(unscaled(scaled(least) + place * span)) : "");
  return { placeOf, ticks, textAt };
}
