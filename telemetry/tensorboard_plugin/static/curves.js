// Curves over steps: loss and learning rates above the picture, rows in view below it.

import { drawChart, legendOf } from "./chart.js";
import { columnAt } from "./field.js";
import { formatNumber } from "./format.js";
import { cssColor } from "./scale.js";

export const STRIP_HEIGHT = 64;

/**
 * @param {HTMLCanvasElement} canvas
 * @param {Object[]} scalars curves of a run, each with its `kind` and `tag`
 * @param {number} lastStep of the run
 * @param {Object} shown `view`, `theme`, `width`, `gutter`, `cursor`
 * @param {number} right room at the right
 * @returns {Element|null} the legend; null without curves
 */
export function drawStrip(canvas, scalars, lastStep, { view, theme, width, gutter, cursor }, right) {
  if (!scalars.length) return null;
  const curves = scalars.map((curve, i) => ({
    ...(curve.kind === "learning rate" ? heldUntil(curve, lastStep) : curve),
    color: theme.curves[i % theme.curves.length],
    label: curve.tag,
    isStepped: curve.kind === "learning rate",
  }));
  const loss = curves.filter((curve) => curve.kind === "loss");
  const rates = curves.filter((curve) => curve.kind !== "loss");
  drawChart(canvas, {
    view,
    theme,
    width,
    height: STRIP_HEIGHT,
    left: gutter,
    right,
    cursor,
    curves: loss.length ? loss : rates,
    log: isLog(loss[0]?.values ?? rates[0].values),
    second: loss.length ? rates : [],
  });
  return legendOf(curves.map((curve) => withValue(curve, cursor)));
}

/** A curve that is written where it changes, up to the last step. */
function heldUntil(curve, lastStep) {
  const { length } = curve.steps;
  if (!length || curve.steps[length - 1] >= lastStep) return curve;
  return {
    ...curve,
    steps: [...curve.steps, lastStep],
    values: [...curve.values, curve.values[length - 1]],
  };
}

/** A curve whose label has its value at a step, or its last value. */
function withValue(curve, step) {
  const index = Math.max(columnAt(curve.steps, step ?? Infinity), 0);
  return { ...curve, label: `${curve.label} ${formatNumber(curve.values[index])}` };
}

/** Whether values span so much that a linear axis would hide most of them. */
function isLog(values) {
  let [low, high] = [Infinity, 0];
  for (const value of values) {
    if (!(value > 0) || value === Infinity) continue;
    low = Math.min(low, value);
    high = Math.max(high, value);
  }
  return high > 50 * low;
}

const MOST = 12;
const SEVERITIES = ["error", "warning", "note"];
const LEAST_HEIGHT = 150;
const MOST_HEIGHT = 420;

/**
 * @param {HTMLCanvasElement} canvas
 * @param {Object} shown what the panel shows, with its `alerts`
 * @param {number} right room at the right
 * @returns {Element} the legend
 */
export function drawLayerCurves(canvas, shown, right) {
  const { rows, view, theme, width, gutter, selection, statistic, mode, spare } = shown;
  const chosen = rows.findIndex((row) => selection && row.layers.includes(selection.layer));
  const [first, end] = [Math.floor(view.row0), Math.min(Math.ceil(view.row1), rows.length)];
  const places = placesOf(first, end, faultyRows(shown, first, end), chosen);
  const curves = places.map((place) => ({
    ...curveOf(shown, place),
    color: place === chosen ? theme.accent : depthColor(theme, rows.length, place),
    width: place === chosen ? 2.5 : 1, // thicker ones take ten times as long
    label: rows[place].label,
  }));
  drawChart(canvas, {
    curves,
    view,
    theme,
    width,
    height: Math.min(Math.max(spare - 40, LEAST_HEIGHT), MOST_HEIGHT),
    left: gutter,
    right,
    log: statistic.log || (mode !== "value" && statistic.log),
    cursor: shown.cursor,
    axis: true,
  });
  return legendOf(curves);
}

/** Rows in view with an alert, the gravest first. */
function faultyRows({ rows, alerts }, first, end) {
  const layers = new Set();
  for (const severity of SEVERITIES) {
    for (const alert of alerts) if (alert.severity === severity) layers.add(alert.layer);
  }
  const rowOfLayer = new Map();
  for (let row = first; row < end; row++) {
    for (const layer of rows[row].layers) rowOfLayer.set(layer, row);
  }
  const found = [...layers].map((layer) => rowOfLayer.get(layer));
  return [...new Set(found)].filter((row) => row !== undefined);
}

/** At most so many rows: those with alerts, others evenly spread; the chosen one is last, on top. */
function placesOf(first, end, faulty, chosen) {
  const wanted = faulty.slice(0, MOST);
  const count = end - first > MOST ? MOST - wanted.length : end - first;
  const others = Array.from({ length: count }, (_, i) =>
    count < 2 ? first : first + Math.round((i * (end - first - 1)) / (count - 1)),
  );
  const places = [...new Set([...wanted, ...others])].sort((a, b) => a - b);
  if (chosen < 0) return places;
  return [...places.filter((place) => place !== chosen), chosen];
}

function curveOf({ field, rows, rowValues }, place) {
  const [steps, values] = [[], []];
  field.steps.forEach((step, column) => {
    const value = rowValues[column * rows.length + place];
    if (value < 0) return;
    steps.push(step);
    values.push(value);
  });
  return { steps, values };
}

/** From the scale of the picture, without the end that fades into the background. */
function depthColor({ isDark }, count, place) {
  const share = count > 1 ? place / (count - 1) : 0;
  return cssColor(false, isDark ? 0.3 + 0.7 * share : 0.85 * share);
}
