// How the numbers of a layer are distributed: histograms over time, and the extremes of its units.

import { drawFrame, drawStep, drawStepAxis, line, prepare, rowAt, setText, yOf } from "./canvas.js";
import { columnAt } from "./field.js";
import { clamp, formatNumber, formatStep } from "./format.js";
import { paintIn } from "./heatmap_pixels.js";
import { encode, makeScale } from "./scale.js";

const LEFT = 58;
const BARS = 0.25; // of the width
const BARS_GAP = 12;
const LABEL_GAP = 20;
const SHADES = { diverging: false, log: false, low: 0, high: 1 };

/** @returns {Object} the plot of a histogram, which has `steps`, `edges`, `shares`, `zeroBin`; see `Plot` */
export function drawHistogram(canvas, histogram, { view, theme, width, height, step }) {
  const { steps } = histogram;
  const context = prepare(canvas, width, height);
  const bars = Math.round(width * BARS);
  const box = { x: LEFT, y: 6, width: width - LEFT - bars - 14, height: height - 30 };
  const bins = histogram.edges.length - 1;
  const column = Math.max(columnAt(steps, step ?? Infinity), 0);
  const cells = { steps, rowCount: bins, view: { ...view, row0: 0, row1: bins }, scale: SHADES, missing: theme.background };
  paintIn(context, box, shadesOf(histogram, bins), cells);
  context.strokeStyle = theme.text;
  drawStep(context, box, view, steps[column]);
  drawValueAxis(context, theme, box, histogram);
  drawStepAxis(context, theme, box, view);
  drawBars(context, theme, box, bars, histogram, bins, column);
  // The bars show one step, independent of the pointer.
  const wide = { ...box, width: box.width + BARS_GAP + bars };
  return {
    box: wide,
    view: { ...view, step1: view.step0 + ((view.step1 - view.step0) * wide.width) / box.width },
    read: (at, y, x) => {
      const shown = x > box.x + box.width ? column : Math.max(columnAt(steps, at), 0);
      return readBin(histogram, bins, shown, bins - 1 - clamp(rowAt(box, { row0: 0, row1: bins }, y), 0, bins - 1));
    },
  };
}

/** The largest share of any bin but that of zeros, which may be most of all values. */
function largestShare(shares, bins, zeroBin) {
  return shares.reduce((most, share, i) => (i % bins === zeroBin ? most : Math.max(most, share)), 1e-9);
}

/** The share of a step's values that are exactly zero, drawn as a separate bar; "" without any. */
export function zeroText({ edges, shares, zeroBin }, column) {
  const share = zeroBin === null ? 0 : shares[column * (edges.length - 1) + zeroBin];
  return share > 0 ? `Exactly zero: ${formatNumber(100 * share)} %, a separate bar.` : "";
}

function readBin({ steps, edges, shares, zeroBin }, bins, column, bin) {
  // The bins next to that of zeros begin at the smallest normal number.
  const edge = (i) => formatNumber(Math.abs(edges[i]) < 1e-38 ? 0 : edges[i]);
  const label = bin === zeroBin ? "exactly zero" : `${edge(bin)} to ${edge(bin + 1)}`;
  const text = `${formatNumber(100 * shares[column * bins + bin])} %`;
  return { step: steps[column], title: `Histogram of step ${formatStep(steps[column])}`, lines: [{ label, text }] };
}

/** Where 5 %, half and 95 % of a step's values are below, interpolated within bins. */
export function quantilesOf({ edges, shares, zeroBin }, column) {
  const bins = edges.length - 1;
  const row = shares.subarray(column * bins, (column + 1) * bins);
  const total = row.reduce((sum, share) => sum + share, 0);
  return [0.05, 0.5, 0.95].map((share) => {
    let below = 0;
    let bin = 0;
    while (bin < bins - 1 && below + row[bin] < share * total) below += row[bin++];
    if (bin === zeroBin) return 0;
    const part = row[bin] > 0 ? (share * total - below) / row[bin] : 0;
    return edges[bin] + clamp(part, 0, 1) * (edges[bin + 1] - edges[bin]);
  });
}

/** The codes of the bins' colors, the highest values first; the square root makes rare values visible. */
function shadesOf({ shares, zeroBin }, bins) {
  const top = largestShare(shares, bins, zeroBin);
  const shades = new Float32Array(shares.length);
  shares.forEach((share, i) => {
    const mirrored = i - (i % bins) + bins - 1 - (i % bins);
    shades[mirrored] = share > 0 ? 0.06 + 0.94 * Math.sqrt(Math.min(share / top, 1)) : -1;
  });
  return encode(SHADES, shades);
}

function drawBars(context, theme, box, width, { shares, zeroBin }, bins, column) {
  const left = box.x + box.width + BARS_GAP;
  const row = shares.subarray(column * bins, (column + 1) * bins);
  const largest = largestShare(row, bins, zeroBin);
  const binHeight = box.height / bins;
  row.forEach((share, bin) => {
    const y = box.y + box.height - (bin + 1) * binHeight;
    context.fillStyle = theme.curves[bin === zeroBin ? 1 : 0];
    // The bar of zeros is cut at the length of the longest other bar; the text has its share.
    context.fillRect(left, y, Math.min(share / largest, 1) * width, Math.max(binHeight - 0.5, 0.8));
  });
  line(context, left - 0.5, box.y, left - 0.5, box.y + box.height);
  setText(context, theme, "right", "top");
  context.fillText(`${formatNumber(100 * largest)} %`, left + width, box.y + box.height + 6);
}

function placeIn(edges, value) {
  const above = Math.max(edges.findIndex((edge) => edge >= value), 1);
  const part = (value - edges[above - 1]) / (edges[above] - edges[above - 1]);
  return (above - 1 + part) / (edges.length - 1);
}

/** Labels of zero, of the ends, and of where the linear part ends; as far as they have room. */
function drawValueAxis(context, theme, box, { edges, zeroBin, unit }) {
  setText(context, theme, "right", "middle");
  drawFrame(context, theme, box);
  const yAt = (value) => box.y + (1 - placeIn(edges, value)) * box.height;
  const [low, high] = [edges[0], edges.at(-1)];
  const taken = [];
  for (const value of [0, low, high, unit, -unit]) {
    const isShown = value >= low && value <= high && taken.every((y) => Math.abs(y - yAt(value)) >= LABEL_GAP);
    if (!isShown) continue;
    taken.push(yAt(value));
    context.fillText(formatNumber(value), box.x - 6, yAt(value));
  }
  const hasZeroLine = zeroBin === null && low < 0 && high > 0;
  if (hasZeroLine) line(context, box.x, yAt(0), box.x + box.width, yAt(0), [2, 3]);
}

// --- units, or channels: how large each gets, which are dead or saturated

const ROW_HEIGHTS = [3, 14]; // of a unit
const HEIGHTS = [40, 200];

/** @returns {Object} the plot of units, which have `steps`, `count` and `extremes`; see `Plot` */
export function drawUnits(canvas, units, { view, theme, width, step }) {
  const { steps, count, extremes } = units;
  const [least, most] = ROW_HEIGHTS.map((height) => count * height);
  const height = Math.max(Math.min(most, HEIGHTS[0]), Math.min(least, HEIGHTS[1]));
  const context = prepare(canvas, width, height + 30);
  const box = { x: LEFT, y: 6, width: width - LEFT - 10, height };
  const sizes = sizesOf(units);
  const scale = makeScale({ log: true }, "value", [sizes]);
  const rows = { ...view, row0: 0, row1: count };
  paintIn(context, box, encode(scale, sizes), { steps, rowCount: count, view: rows, scale, missing: theme.missing });
  drawFrame(context, theme, box);
  setText(context, theme, "right", "middle");
  for (const unit of new Set([0, count - 1])) {
    const y = clamp(yOf(box, rows, unit + 0.5), box.y + 5, box.y + box.height - 5);
    context.fillText(String(unit), box.x - 6, y);
  }
  drawStepAxis(context, theme, box, view);
  context.strokeStyle = theme.text;
  drawStep(context, box, view, steps[Math.max(columnAt(steps, step ?? Infinity), 0)]);
  const read = (at, y) => {
    const unit = clamp(rowAt(box, rows, y), 0, count - 1);
    const column = Math.max(columnAt(steps, at), 0);
    const [low, high] = extremes.subarray(2 * (column * count + unit));
    const text = low > high ? "omitted" : `${formatNumber(low)} to ${formatNumber(high)}`;
    const title = `Unit ${unit} at step ${formatStep(steps[column])}`;
    return { step: steps[column], title, lines: [{ label: low === 0 && high === 0 ? "dead" : "from", text }] };
  };
  return { box, view, read };
}

/** Text with the dead, negative and saturated units of a step, and the number of omitted ones. */
export function unitsText({ steps, count, dead, belowZero, saturated, omitted, sampled }, index) {
  return [
    `${count} units; at step ${formatStep(steps[index])} dead: ${dead[index] || "none"}`,
    belowZero[index] && `always below zero, zero behind a ReLU: ${belowZero[index]}`,
    saturated[index] && `saturated: ${saturated[index]}`,
    omitted[index] && `${omitted[index]} are omitted; the largest are shown`,
    sampled && "some steps are omitted",
  ]
    .filter(Boolean)
    .join("; ");
}

/** The larger magnitude of each unit's extremes; −1 where it was omitted. */
function sizesOf({ extremes }) {
  return Float32Array.from({ length: extremes.length / 2 }, (_, i) => {
    const [low, high] = [extremes[2 * i], extremes[2 * i + 1]];
    return low > high ? -1 : Math.max(Math.abs(low), Math.abs(high));
  });
}
