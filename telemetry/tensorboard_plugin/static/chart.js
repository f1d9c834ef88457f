// Curves over steps on a canvas, with their axes.

import { clip, drawResumed, drawStep, drawStepAxis, line, prepare, setText, xOf } from "./canvas.js";
import { columnAt } from "./field.js";
import { clamp, formatNumber, formatStep, logTicks, roundTicks } from "./format.js";
import { INFINITE_COLORS, NAN_COLORS, scaleText, usualOf } from "./scale.js";

/**
 * A curve has `steps`, ascending, and `values`; `color`, `dash` and `width` of its line; a `label`. It may
 * have the `layer` or `run` that it is of; `isStepped`: a value lasts until the next one; `band`: low and high values
 * of an area behind it; `raw`: values of a fainter line behind it.
 * @typedef {Object} Curve
 */

const LEFT = 58; // room for the values, unless there is another one
const POINTS_AT_ONCE = 64; // a path that goes up and down takes time like the square of its points
const FAINT = 0.25;
const NEAR = 30; // pixels
const MARK_GAP = 6; // pixels between marks of NaN: a line would look like values
// Colors of one pattern also differ in brightness.
const [SOLID, DASHED, DOTTED, MIXED] = [[], [7, 3], [2, 2], [8, 3, 2, 3]];
const DASHES = [SOLID, SOLID, SOLID, SOLID, DASHED, DASHED, DASHED, DOTTED, DOTTED, DOTTED];

/** The color and pattern of a curve: ten of both, then the colors again in another pattern. */
export function styleOf(theme, index) {
  const { length } = theme.curves;
  return { color: theme.curves[index % length], dash: DASHES[index] ?? MIXED };
}

/** The CSS background that looks like a piece of a curve's line. */
export function sampleOf(color, dash = SOLID) {
  let [at, stops] = [0, ""]; // a PDF would lose one with a transparent stop
  dash.forEach((length, i) => {
    stops += `, ${i % 2 ? "var(--background)" : color} ${at}px ${(at += length)}px`;
  });
  return stops ? `repeating-linear-gradient(90deg${stops})` : color;
}

/** Whether values span so much that a linear axis would hide most of them. */
export function isLog(curves) {
  let [low, high] = [Infinity, 0];
  for (const { values } of curves) {
    for (const value of values) {
      if (!(value > 0) || value === Infinity) continue;
      low = Math.min(low, value);
      high = Math.max(high, value);
    }
  }
  return high > 50 * low;
}

export function axisOf(statistic, scale) {
  return {
    log: scale.log,
    range: scale.log ? undefined : [scale.low, scale.high],
    format: (value) => scaleText(scale, value),
    usual: usualOf(statistic, scale),
  };
}

/**
 * Draws curves into a canvas. NaN and infinity show in their own colors as separate marks at the upper
 * edge; values without a place on a logarithmic axis, such as zero, as marks at the lower edge.
 * @param {Object} options `curves` (see `Curve`), `view`, `theme`, `width`, `height`, `left`, `right`, `log`,
 *   `format` (of values), `range` (of the axis; default: that of the curves and of `fit`),
 *   `usual` (values to mark), `cursor` (a step), `marks` (steps of alerts), `resumed` (steps at which
 *   the run was), `hasSteps` (whether there is an axis of steps), `isBare` (without axes),
 *   `second` (curves with a separate scale and without an axis, dashed)
 * @returns {Object} the plot; see `Plot`
 */
export function drawChart(canvas, options) {
  const { theme, view, width, height, left = LEFT, right = 10, hasSteps = false, isBare = false } = options;
  const { curves, second = [], format = formatNumber, usual = [], resumed = [], marks = [] } = options;
  const context = prepare(canvas, width, height);
  const [top, below] = [isBare ? 3 : 6, hasSteps ? 16 : 0];
  const box = { x: left, y: top, width: width - left - right, height: height - 2 * top - below };
  const scale = valueScale(options);
  const secondScale = second.length && valueScale({ curves: second, view });
  if (!isBare) drawValueAxis(context, theme, box, scale, format);
  if (hasSteps) drawStepAxis(context, theme, box, view);
  clip(context, box.x, box.y - 3, box.width, box.height + 6);
  context.strokeStyle = theme.usual;
  for (const value of usual) {
    const y = yOf(scale, box, value);
    line(context, box.x, y, box.x + box.width, y, [6, 4]);
  }
  drawResumed(context, theme, box, view, resumed);
  context.globalAlpha = 0.5;
  context.strokeStyle = theme.error;
  for (const step of marks) drawStep(context, box, view, step);
  context.globalAlpha = 1;
  context.strokeStyle = theme.text;
  if (options.cursor != null) drawStep(context, box, view, options.cursor);
  for (const curve of second) drawCurve(context, box, view, secondScale, { ...curve, dash: DASHED });
  context.globalAlpha = FAINT;
  for (const curve of curves) {
    if (curve.band) drawBand(context, box, view, scale, curve);
    if (curve.raw) drawCurve(context, box, view, scale, { ...curve, values: curve.raw, dash: SOLID });
  }
  context.globalAlpha = 1;
  for (const curve of curves) drawCurve(context, box, view, scale, curve);
  context.restore();
  const read = (step, y) => {
    const lines = curves.map((curve) => readCurve(curve, step, format));
    const { layer, run } = markNearest(lines, scale, box, y) ?? {};
    const others = second.map((curve) => readCurve(curve, step, formatNumber));
    return { step, layer, run: run?.name, lines: [...lines, ...others] };
  };
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

/** Marks and returns the one of several lines whose curve is nearest to a height, if it is near. */
function markNearest(lines, scale, box, y) {
  const distance = ({ value }) => Math.abs(yOf(scale, box, value) - y);
  if (lines.length < 2) return null;
  const nearest = lines.reduce((a, b) => (distance(b) < distance(a) ? b : a));
  if (!(distance(nearest) < NEAR)) return null;
  nearest.isNearest = true;
  return nearest;
}

function yOf({ low, high, log }, box, value) {
  return box.y + (1 - ((log ? Math.log10(value) : value) - low) / (high - low)) * box.height;
}

function valueScale({ curves, view, log = false, range, usual = [], fit = [], isBare = false }) {
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
  if (log) [low, high] = [Math.log10(low), Math.log10(high)];
  if (log && !isBare && high - low < 0.3) [low, high] = [low - 0.2, high + 0.2];
  if (low === high) [low, high] = [low - (Math.abs(low) || 1) / 2, high + (Math.abs(high) || 1) / 2];
  return { low, high, log };
}

/** Round values at the left with lines across. */
function drawValueAxis(context, theme, box, scale, format) {
  setText(context, theme, "right", "middle");
  context.strokeStyle = theme.line;
  for (const { tick, y } of ticksOf(scale, box)) {
    line(context, box.x, y, box.x + box.width, y);
    context.fillText(format(tick), box.x - 6, y);
  }
}

/** At least two ticks: one alone gives no distance. */
function ticksOf(scale, box) {
  const [low, high] = [scale.low, scale.high].map((end) => (scale.log ? 10 ** end : end));
  const count = Math.max(box.height / 26, 2);
  const round = scale.log ? logTicks(low, high, count) : roundTicks(low, high, count, false);
  const ticks = round.length > 1 ? round : [low, high];
  return ticks.map((tick) => ({ tick: Number(tick.toPrecision(12)), y: yOf(scale, box, tick) }));
}

function drawBand(context, box, view, scale, { steps, band: [low, high], color }) {
  const known = [...steps.keys()].filter((i) => Number.isFinite(low[i]) && Number.isFinite(high[i]));
  const edge = (values) => (i) =>
    context.lineTo(xOf(box, view, steps[i]), clamp(yOf(scale, box, values[i]), box.y, box.y + box.height));
  context.fillStyle = color;
  context.beginPath();
  known.forEach(edge(low));
  known.reverse().forEach(edge(high));
  context.fill();
}

function drawCurve(context, box, view, scale, { steps, values, color, isStepped, width = 1.5, dash = SOLID }) {
  const y = (value) => yOf(scale, box, value);
  context.strokeStyle = color;
  context.lineWidth = width;
  context.lineJoin = "round";
  context.setLineDash(dash);
  context.beginPath();
  let [pen, points, lastX] = [false, 0, -Infinity];
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
      context.fillStyle = isFinite ? color : (values[i] === Infinity ? INFINITE_COLORS : NAN_COLORS)[0];
      context.fillRect(x - 1, isFinite ? box.y + box.height - 2 : box.y - 3, 2, 5);
      lastX = x;
    }
    pen = drawable;
  }
  context.stroke();
  context.setLineDash([]);
  context.lineWidth = 1;
  if (steps.length > 1 || !pen) return;
  context.fillStyle = color;
  context.beginPath();
  context.arc(xOf(box, view, steps[0]), y(values[0]), 2.5, 0, 7);
  context.fill();
}
