// Loss and learning rates above the picture.

import { drawChart, legendOf } from "./chart.js";
import { columnAt } from "./field.js";
import { formatNumber } from "./format.js";

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
