// A statistic over the depth at one step, row by row next to the heat map, with each row's own range.

import { clip, line, prepare, setText } from "./canvas.js";
import { columnAt } from "./field.js";
import { formatStep } from "./format.js";
import { AXIS_HEIGHT, TOP } from "./heatmap.js";
import { placeOf, scaleText, scaleTicks, usualOf } from "./scale.js";

const USUAL = [0.05, 0.95]; // quantiles over time that make a row's range
const SAMPLES = 200; // columns that the range is computed from
const MARGIN = 8;

/** How much of a width the profile takes; 0 where there is no room. */
export function profileWidth(width) {
  return width < 480 ? 0 : Math.round(Math.min(Math.max(width * 0.14, 100), 190));
}

/**
 * @param {HTMLCanvasElement} canvas
 * @param {Object} shown `field`, `rowValues`, `ranges`, `scale`, `rows`, `view`, `theme`, `height`; of two
 *   runs `compared`, whose line is dashed
 * @param {number} width
 * @param {number} step
 * @returns {Object|null} the plot; see `Plot`
 */
export function drawProfile(canvas, shown, width, step) {
  const { field, rowValues, scale, rows, view, theme, height } = shown;
  const context = prepare(canvas, width, height);
  const box = { x: MARGIN, y: TOP, width: width - 2 * MARGIN, height: height - TOP - AXIS_HEIGHT };
  const column = Math.max(columnAt(field.steps, step), 0);
  drawAxis(context, theme, box, scale, field.steps.length ? field.steps[column] : null);
  if (!field.steps.length) return null;
  const { low, high } = shown.ranges;
  const y = (row) => box.y + ((row - view.row0) / (view.row1 - view.row0)) * box.height;
  const x = (value) => box.x + placeOf(scale, value) * box.width;
  const rowHeight = box.height / (view.row1 - view.row0);
  const visible = [...rows.keys()].slice(Math.floor(view.row0), Math.ceil(view.row1));
  clip(context, 0, box.y - 1, width, box.height + 2);
  context.fillStyle = theme.missing;
  for (const row of visible) {
    if (!(low[row] <= high[row])) continue;
    const left = x(low[row]);
    context.fillRect(left, y(row), Math.max(x(high[row]) - left, 1.5), rowHeight + 0.3);
  }
  const points = visible.map((row) => ({
    at: y(row + 0.5),
    value: rowValues[column * rows.length + row],
  }));
  const others = shown.compared && shown.mode !== "run" ? valuesOf(shown.compared, step) : null;
  context.fillStyle = theme.usual;
  for (const value of usualOf(shown.statistic, scale)) {
    for (let at = box.y; at < box.y + box.height; at += 8) context.fillRect(x(value) - 0.5, at, 1, 5);
  }
  if (others) {
    context.setLineDash([3, 3]);
    const compared = points.map(({ at }, i) => ({ at, value: others.get(rows[visible[i]].label) ?? -1 }));
    drawLine(context, theme, theme.curves[1], compared, x, box, rowHeight);
    context.setLineDash([]);
  }
  drawLine(context, theme, theme.curves[0], points, x, box, rowHeight);
  context.restore();
  const read = (_, at) => {
    const row = Math.floor(view.row0 + ((at - box.y) / box.height) * (view.row1 - view.row0));
    if (at < box.y || row >= rows.length) return null;
    const line = (label, value) => ({ label, text: value >= 0 || value !== value ? scaleText(scale, value) : "–" });
    const lines = [
      line(`step ${formatStep(field.steps[column])}`, rowValues[column * rows.length + row]),
      ...(others ? [line("the other run", others.get(rows[row].label) ?? -1)] : []),
      line("5 % of its values are below", low[row]),
      line("95 % of its values are below", high[row]),
    ];
    return { step: field.steps[column], row, layer: rows[row].layers[0], title: rows[row].label, lines };
  };
  return { box, read };
}

/** What another run has at a step, by the rows' names. */
function valuesOf({ field, rowValues, rows }, step) {
  const column = columnAt(field.steps, step);
  return new Map(rows.map(({ label }, row) => [label, rowValues[column * rows.length + row] ?? -1]));
}

function drawLine(context, theme, color, points, x, box, rowHeight) {
  context.strokeStyle = context.fillStyle = color;
  context.lineWidth = 1.5;
  context.beginPath();
  let pen = false;
  for (const { at, value } of points) {
    const isNumber = value >= 0 && value < Infinity;
    if (isNumber && pen) context.lineTo(x(value), at);
    else if (isNumber) context.moveTo(x(value), at);
    pen = isNumber || (pen && value < 0); // a layer without the statistic is passed over
  }
  context.stroke();
  const size = Math.min(Math.max(rowHeight / 3, 1), 3);
  for (const { at, value } of points) {
    if (value >= 0 && value < Infinity) {
      if (rowHeight < 5) continue;
      context.beginPath();
      context.arc(x(value), at, size, 0, 7);
      context.fill();
    } else if (!(value < Infinity)) {
      context.fillStyle = value === Infinity ? theme.infinite : theme.nan;
      context.fillRect(box.x + box.width - 4, at - rowHeight / 2, 8, Math.max(rowHeight - 0.5, 1));
      context.fillStyle = color;
    }
  }
}

function drawAxis(context, theme, box, scale, step) {
  setText(context, theme, "center", "bottom");
  if (step !== null) {
    context.fillText(`at step ${formatStep(step)}`, box.x + box.width / 2, box.y - 3);
  }
  context.strokeStyle = theme.line;
  context.strokeRect(box.x - 0.5, box.y - 0.5, box.width + 1, box.height + 1);
  context.textBaseline = "top";
  const ticks = scaleTicks(scale);
  const shown = ticks.length > 2 ? [ticks[0], ticks[ticks.length - 1]] : ticks;
  for (const { place, text } of shown) {
    const x = box.x + place * box.width;
    line(context, x, box.y + box.height, x, box.y + box.height + 4);
    const half = context.measureText(text).width / 2;
    const inside = Math.min(Math.max(x, half), box.x + box.width + MARGIN - half);
    context.fillText(text, inside, box.y + box.height + 6);
  }
}

/** Each row's range over time, without its rarest values; NaN where nothing was measured. */
export function rangesOf(columns, values, rowCount) {
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
    const at = (share) => (count ? sorted[Math.round(share * (count - 1))] : NaN);
    [low[row], high[row]] = USUAL.map(at);
  }
  return { low, high };
}
