// A statistic over the depth at one step, row by row next to the heat map, with each row's own range.

import { clamp, clip, drawFrame, line, prepare, rowAt, setText, yOf } from "./canvas.js";
import { columnAt } from "./field.js";
import { formatStep } from "./format.js";
import { AXIS_HEIGHT, TOP } from "./heatmap.js";
import { INFINITE_COLORS, NAN_COLORS, placeOf, scaleText, scaleTicks, usualOf } from "./scale.js";

const USUAL = [0.05, 0.95]; // quantiles over time that make a row's range
const SAMPLES = 200; // columns that the range is computed from
const MARGIN = 8;

/** How much of a width the profile takes; 0 where there is no room. */
export function profileWidth(width) {
  return width < 480 ? 0 : Math.round(clamp(width * 0.14, 100, 190));
}

/**
 * @param {HTMLCanvasElement} canvas
 * @param {Object} shown of a run; see `contentsOf`
 * @param {number} width
 * @param {number} step
 * @returns {Object|null} the plot; see `Plot`
 */
export function drawProfile(canvas, shown, width, step) {
  const { panel, field, rowValues, ranges: { low, high }, scale, rows, view, theme, height } = shown;
  const context = prepare(canvas, width, height);
  const box = { x: MARGIN, y: TOP, width: width - 2 * MARGIN, height: height - TOP - AXIS_HEIGHT };
  const column = Math.max(columnAt(field.steps, step), 0);
  drawAxis(context, theme, box, scale, field.steps[column]);
  if (!field.steps.length) return null;
  const rowHeight = box.height / (view.row1 - view.row0);
  const xOf = (value) => box.x + placeOf(scale, value) * box.width;
  const visible = [...rows.keys()].slice(Math.floor(view.row0), Math.ceil(view.row1));
  const valueOf = (row) => rowValues[column * rows.length + row];
  const theirs = shown.compared && shown.mode !== "run" ? valuesOf(shown.compared, step) : null;
  const otherOf = (row) => theirs.get(rows[row].label) ?? -1;
  clip(context, 0, box.y - 1, width, box.height + 2);
  context.fillStyle = theme.missing;
  for (const row of visible) {
    if (!(low[row] <= high[row])) continue;
    const left = xOf(low[row]);
    context.fillRect(left, yOf(box, view, row), Math.max(xOf(high[row]) - left, 1.5), rowHeight + 0.3);
  }
  context.fillStyle = theme.usual;
  for (const value of usualOf(shown.statistic, scale)) {
    for (let at = box.y; at < box.y + box.height; at += 8) context.fillRect(xOf(value) - 0.5, at, 1, 5);
  }
  const drawLine = (color, dash, of) => {
    const points = visible.map((row) => [yOf(box, view, row + 0.5), of(row)]);
    drawPoints(context, box, color, dash, points, xOf, rowHeight);
  };
  if (theirs) drawLine(theme.curves[1], [3, 3], otherOf);
  drawLine(theme.curves[0], [], valueOf);
  context.restore();
  const read = (_, y) => {
    const row = rowAt(box, view, y);
    if (y < box.y || row >= rows.length) return null;
    const line = (label, value) => ({ label, text: value >= 0 || value !== value ? scaleText(scale, value) : "–" });
    const lines = [
      line(`step ${formatStep(field.steps[column])}`, valueOf(row)),
      ...(theirs ? [line("the other run", otherOf(row))] : []),
      line("5 % of its values are below", low[row]),
      line("95 % of its values are below", high[row]),
    ];
    const { label, layers: [layer] } = rows[row];
    return { step: field.steps[column], layer: panel.overview.layers[layer].name, title: label, lines };
  };
  return { box, read };
}

/** What another run has at a step, by the rows' names. */
function valuesOf({ field, rowValues, rows }, step) {
  const column = columnAt(field.steps, step);
  return new Map(rows.map(({ label }, row) => [label, rowValues[column * rows.length + row]]));
}

/** A line through the values, and marks at the right for those that are none. */
function drawPoints(context, box, color, dash, points, xOf, rowHeight) {
  const isNumber = (value) => value >= 0 && value < Infinity;
  context.strokeStyle = color;
  context.lineWidth = 1.5;
  context.setLineDash(dash);
  context.beginPath();
  let pen = false;
  for (const [y, value] of points) {
    if (isNumber(value)) context[pen ? "lineTo" : "moveTo"](xOf(value), y);
    pen = isNumber(value) || (pen && value < 0); // a layer without the statistic is passed over
  }
  context.stroke();
  context.setLineDash([]);
  const size = clamp(rowHeight / 3, 1, 3);
  for (const [y, value] of points) {
    if (value < 0 || (isNumber(value) && rowHeight < 5)) continue;
    context.beginPath();
    if (isNumber(value)) context.arc(xOf(value), y, size, 0, 7);
    else context.rect(box.x + box.width - 4, y - rowHeight / 2, 8, Math.max(rowHeight - 0.5, 1));
    context.fillStyle = isNumber(value) ? color : (value === Infinity ? INFINITE_COLORS : NAN_COLORS)[0];
    context.fill();
  }
}

function drawAxis(context, theme, box, scale, step) {
  setText(context, theme, "center", "bottom");
  if (step !== undefined) context.fillText(`at step ${formatStep(step)}`, box.x + box.width / 2, box.y - 3);
  drawFrame(context, theme, box);
  context.textBaseline = "top";
  const ticks = scaleTicks(scale);
  const bottom = box.y + box.height;
  for (const { place, text } of ticks.length > 2 ? [ticks[0], ticks.at(-1)] : ticks) {
    const x = box.x + place * box.width;
    line(context, x, bottom, x, bottom + 4);
    const half = context.measureText(text).width / 2;
    context.fillText(text, clamp(x, half, box.x + box.width + MARGIN - half), bottom + 6);
  }
}

/** Each row's range over time, without its rarest values; NaN where nothing was measured. */
export function rangesOf(values, columns, rowCount) {
  const stride = Math.max(1, Math.ceil(columns / SAMPLES));
  const buffer = new Float32Array(Math.ceil(columns / stride));
  const [low, high] = [new Float32Array(rowCount), new Float32Array(rowCount)];
  for (let row = 0; row < rowCount; row++) {
    let count = 0;
    for (let column = 0; column < columns; column += stride) {
      const value = values[column * rowCount + row];
      if (value >= 0 && value < Infinity) buffer[count++] = value;
    }
    const sorted = buffer.subarray(0, count).sort();
    [low[row], high[row]] = USUAL.map((share) => (count ? sorted[Math.round(share * (count - 1))] : NaN));
  }
  return { low, high };
}
