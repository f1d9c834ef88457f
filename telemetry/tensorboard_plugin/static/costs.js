// Costs over steps: the share of each phase in the time of a step, stacked, and memory.

import { drawChart, legendOf, readCurve, styleOf } from "./chart.js";
import { element } from "./dom.js";
import { aligned } from "./field.js";
import { formatNumber } from "./format.js";

export const COSTS_HEIGHT = 58;
const GIB = 2 ** 30;

/**
 * @param {HTMLCanvasElement} canvas
 * @param {Object[]} scalars curves of a run; those of kind `time` in seconds, of `memory` in bytes
 * @param {Object} shown `view`, `theme`, `width`, `gutter`, `cursor`
 * @param {number} right room at the right
 * @returns {Element|null} the legend; null without times
 */
export function drawCosts(canvas, scalars, { view, theme, width, gutter, cursor }, right) {
  const phases = scalars.filter(({ kind }) => kind === "time");
  if (!phases.length) return null;
  const memory = scalars.filter(({ kind }) => kind === "memory");
  const named = [...phases, ...memory].map((curve, i) => ({ ...curve, ...styleOf(theme, i), label: nameOf(curve) }));
  const [stacked, used] = [stack(named.slice(0, phases.length)), named.slice(phases.length)];
  const second = used.map((curve) => ({ ...curve, values: curve.values.map((bytes) => bytes / GIB) }));
  const format = (share) => `${Math.round(100 * share)} %`;
  drawChart(canvas, {
    view, theme, width, height: COSTS_HEIGHT, left: gutter, right, cursor,
    curves: stacked, range: [0, 1], format, second, secondUsual: [0],
  });
  const read = (step) => [
    ...stacked.map((curve) => readCurve(curve, step, (_, i) => `${formatNumber(1000 * curve.seconds[i])} ms (${format(curve.shares[i])})`)),
    ...second.map((curve) => readCurve(curve, step, (value) => `${formatNumber(value)} GiB`)),
  ];
  canvas.plotted.read = read;
  const title = second.length ? "Time, memory (GiB)" : "Time";
  const legend = legendOf(read(cursor ?? Infinity).map((curve) => ({ ...curve, label: `${curve.label} ${curve.text}` })));
  legend.prepend(element("span", {}, title));
  return legend;
}

/** Curves of which each begins where the one below it ends, at the steps that all have. */
function stack(phases) {
  const { steps, at } = aligned(phases);
  const total = at.map((seconds) => seconds.reduce((sum, spent) => sum + spent, 0));
  let low = steps.map(() => 0);
  return phases.map((phase, number) => {
    const seconds = at.map((of) => of[number]);
    const shares = seconds.map((spent, i) => (total[i] > 0 ? spent / total[i] : 0));
    const values = low.map((share, i) => share + shares[i]);
    const band = [low, values];
    low = values;
    return { ...phase, steps, values, band, seconds, shares, dash: [] };
  });
}

/** `time/data_wait_s` as "data wait". */
function nameOf({ tag }) {
  return tag.replace(/^.*\/|_(s|bytes)$/g, "").replaceAll("_", " ");
}
