// Curves over steps: loss and learning rates above the picture, rows in view below it.

import { drawChart, legendOf, readCurve, styleOf } from "./chart.js";
import { curveAt } from "./field.js";
import { formatNumber } from "./format.js";
import { rowsByLayer } from "./rows.js";
import { scaleText, usualOf } from "./scale.js";

export const STRIP_HEIGHT = 72;

/**
 * @param {HTMLCanvasElement} canvas
 * @param {Object[]} scalars curves of a run, each with its `kind` and `tag`
 * @param {number} lastStep of the run
 * @param {Object} shown `view`, `theme`, `width`, `gutter`, `cursor`, `scalars` of all runs
 * @param {number} right room at the right
 * @returns {Element|null} the legend; null without curves
 */
export function drawStrip(canvas, scalars, lastStep, shown, right) {
  const known = scalars.filter(({ kind }) => kind === "loss" || kind === "learning rate");
  if (!known.length) return null;
  const { view, theme, width, gutter, cursor } = shown;
  const curves = known.map((curve, i) => ({
    ...(curve.kind === "learning rate" ? heldUntil(curve, lastStep) : curve),
    color: theme.curves[i % theme.curves.length],
    label: curve.tag,
    isStepped: curve.kind === "learning rate",
  }));
  const loss = curves.filter((curve) => curve.kind === "loss");
  const rates = curves.filter((curve) => curve.kind !== "loss");
  const fit = loss.length ? shown.scalars.flat().filter((curve) => curve.kind === "loss") : [];
  const first = loss.length ? loss : rates;
  drawChart(canvas, {
    view,
    theme,
    width,
    height: STRIP_HEIGHT,
    left: gutter,
    right,
    cursor,
    curves: first,
    fit,
    log: isLog([...first, ...fit]),
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
  const { text } = readCurve(curve, step ?? Infinity, formatNumber);
  return { ...curve, label: `${curve.label} ${text}` };
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

const MOST = 12;
const SEVERITIES = ["error", "warning", "note"];
const LEAST_HEIGHT = 150;
const MOST_HEIGHT = 420;

/**
 * @param {HTMLCanvasElement} canvas
 * @param {Object} shown contents of the panel; of two runs also `compared`, those of the other panel
 * @param {number} right room at the right
 * @returns {Element} the legend
 */
export function drawLayerCurves(canvas, shown, right) {
  const { view, theme, width, gutter, spare, scale } = shown;
  const curves = layerCurves(shown);
  drawChart(canvas, {
    curves,
    view,
    theme,
    width,
    height: Math.min(Math.max(spare - 40, LEAST_HEIGHT), MOST_HEIGHT),
    left: gutter,
    right,
    fit: shown.compared ? layerCurves(shown.compared) : [],
    ...axisOf(shown.statistic, scale),
    cursor: shown.cursor,
    axis: true,
  });
  return legendOf(curves);
}

function layerCurves(shown) {
  const { rows, view, theme, selection } = shown;
  const chosen = rows.findIndex((row) => selection && row.layers.includes(selection.layer));
  const [first, end] = [Math.floor(view.row0), Math.min(Math.ceil(view.row1), rows.length)];
  const places = placesOf(first, end, faultyRows(shown, first, end), chosen);
  const indices = shown.slots.assign(places.map((place) => rows[place].label));
  return places.map((place, i) => ({
    ...curveAt(shown.field.steps, shown.rowValues, rows.length, place),
    ...styleOf(theme, indices[i]),
    width: place === chosen ? 3 : 1, // thicker ones take ten times as long
    label: rows[place].label,
    isChosen: place === chosen,
    layer: rows[place].layers[0],
  }));
}

/** How a chart's axis shows the values that a scale shows in colors. */
export function axisOf(statistic, scale) {
  return {
    log: scale.log,
    range: scale.log ? undefined : [scale.low, scale.high],
    format: (value) => scaleText(scale, value),
    usual: usualOf(statistic, scale),
  };
}

/** Rows in view with an alert, the gravest first. */
function faultyRows({ rows, alerts }, first, end) {
  const rowOf = rowsByLayer(rows);
  const ordered = SEVERITIES.flatMap((severity) => alerts.filter((a) => a.severity === severity));
  const found = new Set(ordered.map((alert) => rowOf.get(alert.layer)));
  return [...found].filter((row) => row >= first && row < end);
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
