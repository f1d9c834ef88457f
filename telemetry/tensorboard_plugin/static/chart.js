// Curves over steps: the strip above the picture, and the details of a layer.

import { drawStepAxis, line, logTicks, prepare, roundTicks } from "./canvas.js";
import { element } from "./dom.js";
import { columnAt } from "./field.js";
import { formatNumber } from "./format.js";

/**
 * @typedef {Object} Curve
 * @property {ArrayLike<number>} steps ascending
 * @property {ArrayLike<number>} values
 * @property {string} color
 * @property {string} label
 * @property {number} [width] of the line
 * @property {boolean} [isStepped] whether a value lasts until the next one
 */

const SECOND_AXIS = 50; // room that it takes
const POINTS_AT_ONCE = 64; // a path that goes up and down takes time like the square of its points

/**
 * Draws curves into a canvas. What is not finite shows as a mark at the upper edge.
 * @param {HTMLCanvasElement} canvas
 * @param {Object} options `curves`, `view`, `theme`, `width`, `height`, `left`, `right`, `log`,
 *   `cursor` (a step), `marks` (steps of alerts), `axis` (whether to draw steps below), `second`
 *   (curves with a separate scale, dashed)
 */
export function drawChart(canvas, options) {
  const { theme, width, height, left, right = 10, axis = false } = options;
  const context = prepare(canvas, width, height);
  const box = { x: left, y: 6, width: width - left - right, height: height - 12 - (axis ? 16 : 0) };
  const scale = valueScale(options.curves, options.view, options.log);
  drawValueAxis(context, theme, box, scale);
  const second = options.second?.length && valueScale(options.second, options.view, false);
  if (second && right > SECOND_AXIS) drawSecondAxis(context, theme, box, second);
  if (axis) drawStepAxis(context, theme, box, options.view, "");
  context.save();
  context.beginPath();
  context.rect(box.x, box.y - 3, box.width, box.height + 6);
  context.clip();
  for (const step of options.marks ?? []) {
    context.strokeStyle = theme.error;
    context.globalAlpha = 0.5;
    const x = xOf(box, options.view, step);
    line(context, x, box.y, x, box.y + box.height);
    context.globalAlpha = 1;
  }
  if (options.cursor != null) {
    context.strokeStyle = theme.text;
    const x = xOf(box, options.view, options.cursor);
    line(context, x, box.y, x, box.y + box.height);
  }
  if (second) {
    context.setLineDash([5, 3]);
    for (const curve of options.second) drawCurve(context, box, options.view, second, curve);
    context.setLineDash([]);
  }
  for (const curve of options.curves) drawCurve(context, box, options.view, scale, curve);
  context.restore();
  return box;
}

/** Names of curves beside their colors. */
export function legendOf(curves) {
  return element(
    "div",
    { class: "curve-legend" },
    ...curves.map((curve) =>
      element("span", {}, element("i", { style: `background:${curve.color}` }), curve.label),
    ),
  );
}

function xOf(box, view, step) {
  return box.x + ((step - view.step0) / (view.step1 - view.step0)) * box.width;
}

function valueScale(curves, view, log) {
  let [low, high] = [Infinity, -Infinity];
  for (const { steps, values } of curves) {
    for (let i = 0; i < steps.length; i++) {
      const inside = steps[i] >= view.step0 && steps[i] <= view.step1;
      if (!inside || !Number.isFinite(values[i]) || (log && values[i] <= 0)) continue;
      if (values[i] < low) low = values[i];
      if (values[i] > high) high = values[i];
    }
  }
  if (low > high) [low, high] = log ? [0.1, 1] : [0, 1];
  if (log) {
    [low, high] = [Math.log10(low), Math.log10(high)];
    if (high - low < 0.3) [low, high] = [low - 0.2, high + 0.2];
  } else if (low === high)
    [low, high] = [low - (Math.abs(low) || 1) / 2, high + (Math.abs(high) || 1) / 2];
  return { low, high, log };
}

function drawValueAxis(context, theme, box, scale) {
  context.font = theme.smallFont;
  context.textAlign = "right";
  context.textBaseline = "middle";
  context.lineWidth = 1;
  for (const { tick, y } of ticksOf(scale, box)) {
    context.strokeStyle = theme.line;
    line(context, box.x, y, box.x + box.width, y);
    context.fillStyle = theme.muted;
    context.fillText(formatNumber(tick), box.x - 6, y);
  }
}

/** The scale of the dashed curves, at the right. */
function drawSecondAxis(context, theme, box, scale) {
  context.textAlign = "left";
  context.fillStyle = theme.muted;
  context.strokeStyle = theme.muted;
  for (const { tick, y } of ticksOf(scale, box)) {
    line(context, box.x + box.width, y, box.x + box.width + 4, y);
    context.fillText(formatNumber(tick), box.x + box.width + 7, y);
  }
}

function ticksOf(scale, box) {
  const count = Math.max(box.height / 26, 2);
  const ticks = scale.log
    ? logTicks(Math.pow(10, scale.low), Math.pow(10, scale.high), count)
    : roundTicks(scale.low, scale.high, count, false).map(round);
  return ticks.map((tick) => {
    const place = ((scale.log ? Math.log10(tick) : tick) - scale.low) / (scale.high - scale.low);
    return { tick, y: box.y + (1 - place) * box.height };
  });
}

function round(value) {
  return Number(value.toPrecision(12));
}

function drawCurve(context, box, view, scale, curve) {
  const { steps, values, color, isStepped, width = 1.5 } = curve;
  const y = (value) =>
    box.y +
    (1 - ((scale.log ? Math.log10(value) : value) - scale.low) / (scale.high - scale.low)) *
      box.height;
  context.strokeStyle = context.fillStyle = color;
  context.lineWidth = width;
  context.lineJoin = "round";
  context.beginPath();
  let pen = false;
  let points = 0;
  let lastX = -Infinity;
  // What is in view, and a point at either side.
  const end = Math.min(columnAt(steps, view.step1) + 2, steps.length);
  for (let i = Math.max(columnAt(steps, view.step0), 0); i < end; i++) {
    const x = xOf(box, view, steps[i]);
    const drawable = Number.isFinite(values[i]) && (!scale.log || values[i] > 0);
    if (drawable && pen) {
      if (isStepped) context.lineTo(x, y(values[i - 1]));
      context.lineTo(x, y(values[i]));
      if (++points % POINTS_AT_ONCE === 0 && !isStepped) { // those may be dashed
        context.stroke();
        context.beginPath();
        context.moveTo(x, y(values[i]));
      }
    } else if (drawable) context.moveTo(x, y(values[i]));
    else if (!Number.isFinite(values[i]) && x - lastX > 1) {
      context.fillRect(x - 1, box.y - 3, 2, 5);
      lastX = x;
    }
    pen = drawable;
  }
  context.stroke();
  if (steps.length === 1 && pen) {
    context.beginPath();
    context.arc(xOf(box, view, steps[0]), y(values[0]), 2.5, 0, 7);
    context.fill();
  }
}
