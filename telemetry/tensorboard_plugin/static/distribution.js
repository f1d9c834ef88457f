// How the numbers of a layer are distributed: histograms over time, and the extremes of its units.

import { clip, drawStepAxis, line, prepare, setText, xOf } from "./canvas.js";
import { columnAt, endOf } from "./field.js";
import { formatNumber, formatStep } from "./format.js";
import { paint } from "./heatmap_pixels.js";
import { cssColor, encode, makeScale, palette } from "./scale.js";

const LEFT = 58;
const BARS = 0.25; // of the width
const LABEL_GAP = 20;

/**
 * @param {HTMLCanvasElement} canvas
 * @param {Object} histogram `steps`, `edges`, `shares`, `unit`
 * @param {Object} options `view`, `theme`, `width`, `height`, `step`
 * @returns {Object} the plot; see `Plot`
 */
export function drawHistogram(canvas, histogram, { view, theme, width, height, step }) {
  const context = prepare(canvas, width, height);
  const bars = Math.round(width * BARS);
  const box = { x: LEFT, y: 6, width: width - LEFT - bars - 14, height: height - 30 };
  const bins = histogram.edges.length - 1;
  const top = largestShare(histogram.shares, bins, histogram.zeroBin);
  clip(context, box.x, box.y, box.width, box.height);
  drawShades(context, box, histogram, view, bins, top);
  drawQuantiles(context, box, histogram, view);
  context.restore();
  drawValueAxis(context, theme, box, histogram, bins);
  drawStepAxis(context, theme, box, view, "");
  const column = Math.max(columnAt(histogram.steps, step ?? Infinity), 0);
  const x = xOf(box, view, histogram.steps[column]);
  context.strokeStyle = theme.text;
  if (x >= box.x && x <= box.x + box.width) line(context, x, box.y, x, box.y + box.height);
  drawBars(context, theme, box, bars, histogram, bins, column);
  // The bars show one step, independent of the pointer.
  const wide = { ...box, width: box.width + 12 + bars };
  return {
    box: wide,
    view: { ...view, step1: view.step0 + ((view.step1 - view.step0) * wide.width) / box.width },
    read: (at, y, x) => {
      const shown = x > box.x + box.width ? column : Math.max(columnAt(histogram.steps, at), 0);
      const bin = Math.floor((1 - (y - box.y) / box.height) * bins);
      return readBin(histogram, bins, shown, Math.min(Math.max(bin, 0), bins - 1));
    },
  };
}

/** The largest share of any bin but that of zeros, which may be most of all values. */
function largestShare(shares, bins, zeroBin) {
  return shares.reduce((most, share, i) => (i % bins === zeroBin ? most : Math.max(most, share)), 1e-9);
}

/** The share of exact zeros at a step; 0 without zeros. */
export function shareOfZeros({ edges, shares, zeroBin }, column) {
  return zeroBin === null ? 0 : shares[column * (edges.length - 1) + zeroBin];
}

function readBin({ steps, edges, shares, zeroBin }, bins, column, bin) {
  // The bins next to that of zeros begin at the smallest normal number.
  const edge = (i) => formatNumber(Math.abs(edges[i]) < 1e-38 ? 0 : edges[i]);
  const range = `${edge(bin)} to ${edge(bin + 1)}`;
  const label = bin === zeroBin ? "exactly zero" : range;
  const text = `${formatNumber(100 * shares[column * bins + bin])} %`;
  const title = `Histogram of step ${formatStep(steps[column])}`;
  return { step: steps[column], title, lines: [{ label, text }] };
}

/** Quantiles of a step's values, interpolated within bins. */
export function quantilesOf({ edges, shares, zeroBin }, column, wanted) {
  const bins = edges.length - 1;
  const row = shares.subarray(column * bins, (column + 1) * bins);
  const total = row.reduce((sum, share) => sum + share, 0);
  return wanted.map((share) => {
    let below = 0;
    let bin = 0;
    while (bin < bins - 1 && below + row[bin] < share * total) below += row[bin++];
    if (bin === zeroBin) return 0;
    const part = row[bin] > 0 ? (share * total - below) / row[bin] : 0;
    return edges[bin] + Math.min(Math.max(part, 0), 1) * (edges[bin + 1] - edges[bin]);
  });
}

function drawShades(context, box, { steps, shares }, view, bins, top) {
  const end = endOf(steps);
  const binHeight = box.height / bins;
  for (let column = 0; column < steps.length; column++) {
    const left = xOf(box, view, steps[column]);
    const right = xOf(box, view, steps[column + 1] ?? end);
    if (right < box.x || left > box.x + box.width) continue;
    for (let bin = 0; bin < bins; bin++) {
      const share = shares[column * bins + bin];
      if (!(share > 0)) continue;
      // The square root makes rare values visible.
      context.fillStyle = cssColor(false, 0.06 + 0.94 * Math.sqrt(Math.min(share / top, 1)));
      const y = box.y + box.height - (bin + 1) * binHeight;
      context.fillRect(left, y, Math.max(right - left, 1) + 0.4, binHeight + 0.4);
    }
  }
}

/** The median and the ends of the middle 90 % over time. */
function drawQuantiles(context, box, histogram, view) {
  const { steps, edges } = histogram;
  const y = (value) => box.y + (1 - placeIn(edges, value)) * box.height;
  const known = Array.from(steps, (step, column) => [step, quantilesOf(histogram, column, [0.05, 0.5, 0.95])]);
  for (const [color, width] of [["#000000", 3], ["#ffffff", 1.2]]) {
    context.strokeStyle = color;
    context.lineWidth = width;
    for (const i of [0, 1, 2]) {
      context.beginPath();
      for (const [step, values] of known) context.lineTo(xOf(box, view, step), y(values[i]));
      context.stroke();
    }
  }
  context.lineWidth = 1;
}

function drawBars(context, theme, box, width, { shares, zeroBin }, bins, column) {
  const left = box.x + box.width + 12;
  const row = shares.subarray(column * bins, (column + 1) * bins);
  const largest = largestShare(row, bins, zeroBin);
  const binHeight = box.height / bins;
  row.forEach((share, bin) => {
    const y = box.y + box.height - (bin + 1) * binHeight;
    context.fillStyle = theme.curves[bin === zeroBin ? 1 : 0];
    // The bar of zeros is cut at the length of the longest other bar; the text has its share.
    context.fillRect(left, y, Math.min(share / largest, 1) * width, Math.max(binHeight - 0.5, 0.8));
  });
  context.strokeStyle = theme.line;
  line(context, left - 0.5, box.y, left - 0.5, box.y + box.height);
  setText(context, theme, "right", "top");
  context.fillText(`${formatNumber(100 * largest)} %`, left + width, box.y + box.height + 6);
}

/** The place of a value on the axis, 0 to 1. */
function placeIn(edges, value) {
  const above = Math.max(edges.findIndex((edge) => edge >= value), 1);
  const part = (value - edges[above - 1]) / (edges[above] - edges[above - 1]);
  return (above - 1 + part) / (edges.length - 1);
}

/** Round values and their places on the axis, 0 to 1, not closer than a label is high. */
function roundEdges(edges, bins, height) {
  const reach = Math.max(-edges[0], edges[bins]);
  const positive = [];
  for (let power = Math.ceil(Math.log10(reach)); positive.length < 24; power--) {
    for (const factor of [5, 2, 1]) positive.push(Number(`${factor}e${power}`));
  }
  const found = [];
  for (const value of [0, ...positive, ...positive.map((tick) => -tick)]) {
    if (value < edges[0] || value > edges[bins]) continue;
    const place = placeIn(edges, value);
    if (found.every((other) => Math.abs(other.place - place) * height >= LABEL_GAP)) {
      found.push({ value, place });
    }
  }
  return found;
}

function drawValueAxis(context, theme, box, { edges, zeroBin }, bins) {
  setText(context, theme, "right", "middle");
  context.strokeStyle = theme.line;
  context.strokeRect(box.x - 0.5, box.y - 0.5, box.width + 1, box.height + 1);
  for (const { value, place } of roundEdges(edges, bins, box.height)) {
    context.fillText(formatNumber(value), box.x - 6, box.y + (1 - place) * box.height);
  }
  const zero = edges.findIndex((edge) => edge >= 0);
  if (edges[0] < 0 && zero > 0 && zeroBin === null) {
    const share = zero - edges[zero] / (edges[zero] - edges[zero - 1]);
    const y = box.y + (1 - share / bins) * box.height;
    context.setLineDash([2, 3]);
    line(context, box.x, y, box.x + box.width, y);
    context.setLineDash([]);
  }
}

// --- units, or channels: how large each gets, which are dead or saturated

const ROW_HEIGHTS = [3, 14]; // of a unit
const HEIGHTS = [40, 200];

/**
 * @param {HTMLCanvasElement} canvas
 * @param {Object} units `steps`, `count`, `extremes`, and `dead`, `saturated` as texts of each step
 * @param {Object} options `view`, `theme`, `width`, `step`
 * @returns {Object} the plot; see `Plot`
 */
export function drawUnits(canvas, units, { view, theme, width, step }) {
  const { steps, count, extremes } = units;
  const [least, most] = ROW_HEIGHTS.map((height) => count * height);
  const inner = Math.max(Math.min(most, HEIGHTS[0]), Math.min(least, HEIGHTS[1]));
  const context = prepare(canvas, width, inner + 30);
  const box = { x: LEFT, y: 6, width: width - LEFT - 10, height: inner };
  const sizes = sizesOf(units);
  const scale = makeScale({ log: true }, "value", [sizes]);
  const ratio = canvas.width / width;
  const [x, y, columns, rows] = [box.x, box.y, box.width, box.height].map((s) => Math.round(s * ratio));
  const image = context.createImageData(columns, rows);
  const visible = { ...view, row0: 0, row1: count };
  paint(image, steps, encode(scale, sizes), palette(false, theme.missing), count, visible, false);
  context.putImageData(image, x, y);
  context.strokeStyle = theme.line;
  context.strokeRect(box.x - 0.5, box.y - 0.5, box.width + 1, box.height + 1);
  setText(context, theme, "right", "middle");
  const middle = (unit) => box.y + ((unit + 0.5) / count) * box.height;
  for (const unit of new Set([0, count - 1])) {
    const place = Math.min(Math.max(middle(unit), box.y + 5), box.y + box.height - 5);
    context.fillText(String(unit), box.x - 6, place);
  }
  drawStepAxis(context, theme, box, view, "");
  const chosen = Math.max(columnAt(steps, step ?? Infinity), 0);
  context.fillStyle = theme.text;
  context.fillRect(xOf(box, view, steps[chosen]) - 0.5, box.y, 1, box.height);
  const read = (at, height) => {
    const unit = Math.min(Math.max(Math.floor(((height - box.y) / box.height) * count), 0), count - 1);
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
    belowZero[index] ? `always below zero, zero behind a ReLU: ${belowZero[index]}` : "",
    saturated[index] ? `saturated: ${saturated[index]}` : "",
    omitted[index] ? `${omitted[index]} are omitted; the largest are shown` : "",
    sampled ? "some steps are omitted" : "",
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
