// What is around the picture of a run: loss and learning rates, time and memory, some layers, the profile.

import { clip, drawFrame, drawTicks, line, prepare, rowAt, setText, yOf } from "./canvas.js";
import { axisOf, drawChart, isLog, readCurve, styleOf } from "./chart.js";
import { columnAt, curveAt } from "./field.js";
import { clamp, formatNumber, formatStep } from "./format.js";
import { AXIS_HEIGHT, heightOf, TOP } from "./heatmap.js";
import { rowsByLayer } from "./rows.js";
import { extended, INFINITE_COLORS, NAN_COLORS, placesOn, scaleText, scaleTicks, usualOf } from "./scale.js";

const STRIP_HEIGHT = 72;
const GIB = 2 ** 30;

/** The legend of loss and learning rates, in a ratio of two runs also of the other's loss, and what draws them; or null. */
export function stripOf(shown) {
  const { panel: { scalars }, theme, mode, losses, cursor } = shown;
  const own = scalars.filter(({ kind }) => kind === "loss" || kind === "learning rate");
  const others = mode === "run" ? losses.filter((curve) => !own.includes(curve)) : [];
  const known = [...own, ...others].map((curve, i) => ({
    ...curve,
    color: theme.curves[i % theme.curves.length],
    label: others.includes(curve) ? `${curve.tag} of the other run` : curve.tag,
    isStepped: curve.kind !== "loss",
  }));
  if (!known.length) return null;
  const [loss, rates] = [known.filter(({ isStepped }) => !isStepped), known.filter(({ isStepped }) => isStepped)];
  const [curves, second, fit] = loss.length ? [loss, rates, losses] : [rates, [], []];
  const options = { ...frameOf(shown), height: STRIP_HEIGHT, curves, second, fit, log: isLog([...curves, ...fit]) };
  const legend = known.map((curve) => ({
    ...curve,
    label: `${curve.label} ${readCurve(curve, cursor ?? Infinity, formatNumber).text}`,
  }));
  return { legend, draw: (canvas) => drawChart(canvas, options) };
}

/** Options of a chart that is level with the picture. */
function frameOf({ view, theme, width, right, gutter: left, cursor, resumed }) {
  return { view, theme, width, right, left, cursor, resumed };
}

/** Parts of the time of a step, and memory, in a line: at the selected step, or the last one; "" without any. */
export function costsOf({ panel: { scalars }, cursor }) {
  const named = (kind, textOf) => {
    const curves = scalars.filter((curve) => curve.kind === kind);
    const values = curves.map((curve) => curve.values[Math.max(columnAt(curve.steps, cursor ?? Infinity), 0)]);
    const total = values.reduce((sum, value) => sum + value, 0);
    return curves.map((curve, i) => `${nameOf(curve)} ${textOf(values[i], total)}`);
  };
  const time = (spent, total) => `${formatNumber(1000 * spent)} ms (${Math.round((100 * spent) / (total || 1))} %)`;
  const phases = named("time", time);
  if (!phases.length) return "";
  const memory = named("memory", (bytes) => `${formatNumber(bytes / GIB)} GiB`);
  return `Time, memory: ${[...phases, ...memory].join(" · ")}`;
}

/** `time/data_wait_s` as "data wait". */
function nameOf({ tag }) {
  return tag.replace(/^.*\/|_(s|bytes)$/g, "").replaceAll("_", " ");
}

// --- layers

const MOST = 12;
const HEIGHTS = [150, 420];

/** Curves of the rows in view that have alerts, the first ones, and on top that of the selected layer. */
export function curvesOfLayers({ panel, rows, view, theme, selection, alerts, field, rowValues }) {
  const rowOf = rowsByLayer(rows);
  const [first, end] = [Math.floor(view.row0), Math.min(Math.ceil(view.row1), rows.length)];
  const chosen = rowOf.get(selection?.layer) ?? -1;
  const faulty = new Set(alerts.map(({ layer }) => rowOf.get(layer)));
  const places = [...faulty].filter((row) => row >= first && row < end && row !== chosen).slice(0, MOST);
  places.sort((a, b) => a - b);
  if (chosen >= 0) places.push(chosen);
  const curves = places.map((place) => ({
    ...curveAt(field.steps, rowValues, rows.length, place),
    width: place === chosen ? 3 : 1, // thicker ones take ten times as long
    label: rows[place].label,
    layer: panel.overview.layers[rows[place].layers[0]].name,
  }));
  return curves.filter(({ steps }) => steps.length).map((curve, i) => ({ ...curve, ...styleOf(theme, i) }));
}

/** Options of the chart of these curves; two runs have one axis. */
export function chartOf(shown) {
  const { curves, fit, spare, scale, statistic } = shown;
  const options = { curves, fit, height: clamp(spare - 40, ...HEIGHTS), hasSteps: true };
  return { ...frameOf(shown), ...options, ...axisOf(statistic, scale) };
}

// --- the profile: the statistic over the depth at one step, next to the picture, with the range of each row

const USUAL = [0.05, 0.95]; // quantiles over time that make a row's range
const SAMPLES = 200; // columns that the range is computed from
const MARGIN = 8;

export function profileWidth(width) {
  return width < 480 ? 0 : Math.round(clamp(width * 0.14, 100, 190));
}

/** @returns {Object|null} the plot of a run at a step; see `contentsOf` and `Plot` */
export function drawProfile(canvas, shown, step) {
  const { rightOf: width, panel, field, rowValues, ranges, rows, view, theme, height } = shown;
  const context = prepare(canvas, width, height);
  const box = { x: MARGIN, y: TOP, width: width - 2 * MARGIN, height: height - TOP - AXIS_HEIGHT };
  const column = Math.max(columnAt(field.steps, step), 0);
  const valueOf = (row) => rowValues[column * rows.length + row];
  const scale = extended(shown.scale, [...ranges.flat(), ...rows.map((_, row) => valueOf(row))]);
  drawAxis(context, theme, box, scale, field.steps[column]);
  if (!field.steps.length) return null;
  const rowHeight = box.height / (view.row1 - view.row0);
  const placeOf = placesOn(scale);
  const xOf = (value) => box.x + placeOf(value) * box.width;
  const visible = [...rows.keys()].slice(Math.floor(view.row0), Math.ceil(view.row1));
  clip(context, 0, box.y - 1, width, box.height + 2);
  context.fillStyle = theme.missing;
  for (const row of visible) {
    const [left, right] = ranges[row].map(xOf); // NaN draws nothing
    context.fillRect(left, yOf(box, view, row), Math.max(right - left, 1.5), rowHeight + 0.3);
  }
  context.strokeStyle = theme.usual;
  for (const value of usualOf(shown.statistic, scale)) {
    line(context, xOf(value), box.y, xOf(value), box.y + box.height, [5, 3]);
  }
  const points = visible.map((row) => [yOf(box, view, row + 0.5), valueOf(row)]);
  drawPoints(context, box, theme.curves[0], points, xOf, rowHeight);
  context.restore();
  const read = (_, y) => {
    const row = rowAt(box, view, y);
    if (y < box.y || row >= rows.length) return null;
    const text = (value) => (value >= 0 || value !== value ? scaleText(scale, value) : "–");
    const shares = ranges[row].map((end, i) => ({ label: `${100 * USUAL[i]} % of its values are below`, text: text(end) }));
    const lines = [{ label: `step ${formatStep(field.steps[column])}`, text: text(valueOf(row)) }, ...shares];
    const { label, layers: [layer] } = rows[row];
    return { step: field.steps[column], layer: panel.overview.layers[layer].name, title: label, lines };
  };
  return { box, read, yOf: (layer) => heightOf({ ...shown, box }, layer) };
}

/** A line through the values, and marks at the right for those that are none. */
function drawPoints(context, box, color, points, xOf, rowHeight) {
  const isNumber = (value) => value >= 0 && value < Infinity;
  context.strokeStyle = color;
  context.lineWidth = 1.5;
  context.beginPath();
  let pen = false;
  for (const [y, value] of points) {
    if (isNumber(value)) context[pen ? "lineTo" : "moveTo"](xOf(value), y);
    pen = isNumber(value) || (pen && value < 0); // a layer without the statistic is passed over
  }
  context.stroke();
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
  const ends = scaleTicks(scale).filter((_, i, { length }) => i === 0 || i === length - 1);
  drawTicks(context, theme, box, ends.map(({ place, text }) => ({ x: box.x + place * box.width, text })));
}

/** The low and high end of each row's range over time, without its rarest values; undefined where nothing was measured. */
export function rangesOf(values, columns, rowCount) {
  const stride = Math.max(1, Math.ceil(columns / SAMPLES));
  const buffer = new Float32Array(Math.ceil(columns / stride));
  return Array.from({ length: rowCount }, (_, row) => {
    let count = 0;
    for (let column = 0; column < columns; column += stride) {
      const value = values[column * rowCount + row];
      if (value >= 0 && value < Infinity) buffer[count++] = value;
    }
    const sorted = buffer.subarray(0, count).sort();
    return USUAL.map((share) => sorted[Math.round(share * (count - 1))]);
  });
}
