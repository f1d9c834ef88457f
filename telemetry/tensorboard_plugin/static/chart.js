// Curves over steps on a canvas, with their axes.

import { clip, drawStepAxis, line, logTicks, prepare, roundTicks, setText, xOf } from "./canvas.js";
import { columnAt } from "./field.js";
import { formatNumber, formatStep } from "./format.js";

/**
 * @typedef {Object} Curve
 * @property {ArrayLike<number>} steps ascending
 * @property {ArrayLike<number>} values
 * @property {string} color
 * @property {number[]} [dash] pattern of the line
 * @property {string} label
 * @property {number} [width] of the line
 * @property {boolean} [isStepped] whether a value lasts until the next one
 * @property {ArrayLike<number>[]} [band] low and high values of an area behind it
 * @property {ArrayLike<number>} [raw] values of a fainter line behind it
 */

const SECOND_AXIS = 50; // room that it takes
const POINTS_AT_ONCE = 64; // a path that goes up and down takes time like the square of its points
const FAINT = 0.25;
const MARK_GAP = 6; // pixels between marks of NaN: a line would look like values
// Colors of one pattern also differ in brightness.
const [SOLID, DASHED, DOTTED, MIXED] = [[], [7, 3], [2, 2], [8, 3, 2, 3]];
const DASHES = [SOLID, SOLID, SOLID, SOLID, DASHED, DASHED, DASHED, DOTTED, DOTTED, DOTTED];

/** The color and pattern of a curve: ten of both, then the colors again in another pattern. */
export function styleOf(theme, index) {
  const { length } = theme.curves;
  return { color: theme.curves[index % length], dash: DASHES[index] ?? MIXED };
}

/** Numbers for names; a name keeps its number. */
export class Slots {
  constructor() {
    this.known = new Map();
  }

  /** The lowest free number for each new name. @returns {number[]} */
  assign(names) {
    const used = new Set();
    const isFree = (name) => this.known.has(name) && !used.has(this.known.get(name));
    const kept = new Set(names.filter((name) => isFree(name) && used.add(this.known.get(name))));
    let next = 0;
    for (const name of names) {
      if (kept.has(name)) continue;
      while (used.has(next)) next += 1;
      used.add(next);
      this.known.set(name, next);
    }
    return names.map((name) => this.known.get(name));
  }
}

/**
 * Draws curves into a canvas. NaN and infinity show in their own colors as separate marks at the upper
 * edge; values without a place on a logarithmic axis, such as zero, as marks at the lower edge.
 * @param {HTMLCanvasElement} canvas
 * @param {Object} options `curves`, `view`, `theme`, `width`, `height`, `left`, `right`, `log`,
 *   `format` (of values), `range` (of the axis; default: that of the curves and of `fit`),
 *   `usual` (values to mark), `cursor` (a step), `marks` (steps of alerts), `axis` (whether to draw
 *   steps below), `second` (curves with a separate scale, dashed), `secondUsual` (values that it has)
 * @returns {Object} the plot; see `Plot`
 */
export function drawChart(canvas, options) {
  const { theme, view, width, height, left, right = 10, axis = false } = options;
  const { curves, second = [], format = formatNumber } = options;
  const context = prepare(canvas, width, height);
  const box = { x: left, y: 6, width: width - left - right, height: height - 12 - (axis ? 16 : 0) };
  const scale = valueScale(options);
  drawValueAxis(context, theme, box, scale, format);
  const secondScale = second.length && valueScale({ curves: second, view, usual: options.secondUsual });
  if (secondScale && right > SECOND_AXIS) drawSecondAxis(context, theme, box, secondScale);
  if (axis) drawStepAxis(context, theme, box, view, "");
  for (const value of options.usual ?? []) drawUsual(context, theme, box, yOf(scale, box, value));
  clip(context, box.x, box.y - 3, box.width, box.height + 6);
  const drawStep = (step, color, alpha) => {
    context.strokeStyle = color;
    context.globalAlpha = alpha;
    const x = xOf(box, view, step);
    line(context, x, box.y, x, box.y + box.height);
    context.globalAlpha = 1;
  };
  for (const step of options.marks ?? []) drawStep(step, theme.error, 0.5);
  if (options.cursor != null) drawStep(options.cursor, theme.text, 1);
  for (const curve of second) drawCurve(context, theme, box, view, secondScale, { ...curve, dash: DASHED });
  for (const curve of curves) {
    context.globalAlpha = FAINT;
    if (curve.band) drawBand(context, box, view, scale, curve);
    if (curve.raw) drawCurve(context, theme, box, view, scale, { ...curve, values: curve.raw, dash: SOLID });
    context.globalAlpha = 1;
  }
  for (const curve of curves) drawCurve(context, theme, box, view, scale, curve);
  context.restore();
  const read = (step, y) => [
    ...markNearest(curves.map((curve) => readCurve(curve, step, format)), scale, box, y),
    ...second.map((curve) => readCurve(curve, step, formatNumber)),
  ];
  return { box, view, read };
}

/** The last value of a curve up to a step (infinity: the end), formatted with its index, and its step. */
export function readCurve(curve, step, format) {
  const column = columnAt(curve.steps, step);
  const value = curve.values[column];
  if (column < 0) return { ...curve, value, text: "–" };
  const isCurrent = curve.isStepped || step === Infinity || curve.steps[column] === step;
  const of = isCurrent ? "" : ` (step ${formatStep(curve.steps[column])})`;
  return { ...curve, value, text: format(value, column) + of };
}

/** The same lines; the one whose curve is nearest to a height is marked. */
function markNearest(lines, scale, box, y) {
  const distance = ({ value }) => Math.abs(yOf(scale, box, value) - y);
  const nearest = lines.reduce((a, b) => (distance(b) < distance(a) ? b : a), lines[0]);
  if (lines.length > 1 && distance(nearest) < 30) nearest.isNearest = true;
  return lines;
}

/** The CSS background that looks like a piece of a curve's line. */
export function sampleOf(color, dash = SOLID) {
  let [at, stops] = [0, ""]; // a PDF would lose one with a transparent stop
  dash.forEach((length, i) => {
    stops += `, ${i % 2 ? "var(--background)" : color} ${at}px ${(at += length)}px`;
  });
  return stops ? `repeating-linear-gradient(90deg${stops})` : color;
}

function yOf({ low, high, log }, box, value) {
  return box.y + (1 - ((log ? Math.log10(value) : value) - low) / (high - low)) * box.height;
}

function valueScale({ curves, view, log = false, range, usual = [], fit = [] }) {
  if (range) return { low: range[0], high: range[1], log: false };
  let [low, high] = [Infinity, -Infinity];
  const include = (value) => {
    if (!Number.isFinite(value) || (log && value <= 0)) return;
    if (value < low) low = value;
    if (value > high) high = value;
  };
  for (const { steps, values } of [...curves, ...fit]) {
    for (let i = 0; i < steps.length; i++) {
      if (steps[i] >= view.step0 && steps[i] <= view.step1) include(values[i]);
    }
  }
  usual.forEach(include);
  if (low > high) [low, high] = log ? [0.1, 1] : [0, 1];
  if (log) {
    [low, high] = [Math.log10(low), Math.log10(high)];
    if (high - low < 0.3) [low, high] = [low - 0.2, high + 0.2];
  } else if (low === high)
    [low, high] = [low - (Math.abs(low) || 1) / 2, high + (Math.abs(high) || 1) / 2];
  return { low, high, log };
}

function drawValueAxis(context, theme, box, scale, format) {
  setText(context, theme, "right", "middle");
  context.lineWidth = 1;
  for (const { tick, y } of ticksOf(scale, box)) {
    context.strokeStyle = theme.line;
    line(context, box.x, y, box.x + box.width, y);
    context.fillText(format(tick), box.x - 6, y);
  }
}

/** The scale of the dashed curves, at the right. */
function drawSecondAxis(context, theme, box, scale) {
  setText(context, theme, "left", "middle");
  context.strokeStyle = theme.muted;
  for (const { tick, y } of ticksOf(scale, box)) {
    line(context, box.x + box.width, y, box.x + box.width + 4, y);
    context.fillText(formatNumber(tick), box.x + box.width + 7, y);
  }
}

/** A line at the usual value. */
function drawUsual(context, theme, box, y) {
  if (!(y >= box.y - 1 && y <= box.y + box.height + 1)) return;
  context.strokeStyle = context.fillStyle = theme.usual;
  context.setLineDash([6, 4]);
  line(context, box.x, y, box.x + box.width, y);
  context.setLineDash([]);
}

/** At least two ticks: one alone gives no distance. */
function ticksOf(scale, box) {
  const least = Math.max(box.height / 26, 2);
  let ticks = [];
  for (let count = least; ticks.length < 2 && count < least + 9; count++) {
    ticks = scale.log
      ? logTicks(Math.pow(10, scale.low), Math.pow(10, scale.high), count)
      : roundTicks(scale.low, scale.high, count, false).map((tick) => Number(tick.toPrecision(12)));
  }
  return ticks.map((tick) => ({ tick, y: yOf(scale, box, tick) }));
}

function drawBand(context, box, view, scale, { steps, band: [low, high], color }) {
  const y = (value) => Math.min(Math.max(yOf(scale, box, value), box.y), box.y + box.height);
  const known = [...steps.keys()].filter((i) => Number.isFinite(low[i]) && Number.isFinite(high[i]));
  const edge = (values) => (i) => context.lineTo(xOf(box, view, steps[i]), y(values[i]));
  context.fillStyle = color;
  context.beginPath();
  known.forEach(edge(low));
  known.reverse().forEach(edge(high));
  context.fill();
}

function drawCurve(context, theme, box, view, scale, curve) {
  const { steps, values, color, isStepped, width = 1.5, dash = [] } = curve;
  const y = (value) => yOf(scale, box, value);
  context.strokeStyle = context.fillStyle = color;
  context.lineWidth = width;
  context.lineJoin = "round";
  context.setLineDash(dash);
  context.beginPath();
  let pen = false;
  let points = 0;
  let lastX = -Infinity;
  // The points in view, and one at either side.
  const end = Math.min(columnAt(steps, view.step1) + 2, steps.length);
  for (let i = Math.max(columnAt(steps, view.step0), 0); i < end; i++) {
    const x = xOf(box, view, steps[i]);
    const drawable = Number.isFinite(values[i]) && (!scale.log || values[i] > 0);
    if (drawable && pen) {
      if (isStepped) context.lineTo(x, y(values[i - 1]));
      context.lineTo(x, y(values[i]));
      if (++points % POINTS_AT_ONCE === 0) {
        context.stroke();
        context.beginPath();
        context.moveTo(x, y(values[i]));
      }
    } else if (drawable) context.moveTo(x, y(values[i]));
    else if (x - lastX >= MARK_GAP) {
      const isFinite = Number.isFinite(values[i]);
      context.fillStyle = isFinite ? color : values[i] === Infinity ? theme.infinite : theme.nan;
      context.fillRect(x - 1, isFinite ? box.y + box.height - 2 : box.y - 3, 2, 5);
      lastX = x;
    }
    pen = drawable;
  }
  context.stroke();
  context.setLineDash([]);
  context.fillStyle = color;
  if (steps.length === 1 && pen) {
    context.beginPath();
    context.arc(xOf(box, view, steps[0]), y(values[0]), 2.5, 0, 7);
    context.fill();
  }
}
