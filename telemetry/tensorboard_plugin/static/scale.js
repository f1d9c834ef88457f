// Color scales: from values to colors.

import { drawShape, drawTicks, prepare } from "./canvas.js";
import { clamp, formatNumber, logTicks } from "./format.js";

// Two colors of stripes each.
export const NAN_COLORS = ["#d5006d", "#ff7ac0"];
export const INFINITE_COLORS = ["#ff5a00", "#7a1f00"];

export const ZERO_COLOR = "#000000";

export const MODES = {
  value: "values",
  own: "ratio to the layer's median",
  depth: "ratio to the median layer",
  run: "ratio to the other run",
};

/** Codes of a cell, in the order in which they win where several cells share a pixel. */
const MISSING_CODE = 0;
const ZERO_CODE = 1;
export const FIRST_CODE = 2;
export const LAST_CODE = 253;
export const INFINITE_CODE = 254;
export const NAN_CODE = 255;

// viridis (matplotlib, CC0), every eighth color, from the smallest value to the largest.
const SEQUENTIAL = parseStops(
  "440154470d6048186a482475472e7c4538824241863e4c8a3a548c365d8d32658e2e6d8e2b758e287d8e25848e" +
    "228c8d1f948c1e9c8920a38625ab822eb37c3aba7648c16e58c76569cd5b7fd34e93d741a8db34bddf26d5e21a" +
    "eae51afde725",
);
// From blue over gray to orange, nearly even in OKLab, dark at both ends alike.
const DIVERGING = parseStops("08407e2166ac4393c392c5deddddddfdb863e08214b358067f3b08");

/** Color of each code, as the pixels of `ImageData` hold it. */
export function palette(diverging, missing) {
  const colors = new Uint32Array(256);
  const stops = diverging ? DIVERGING : SEQUENTIAL;
  for (let code = FIRST_CODE; code <= LAST_CODE; code++) {
    colors[code] = pixel(mix(stops, (code - FIRST_CODE) / (LAST_CODE - FIRST_CODE)));
  }
  colors[MISSING_CODE] = pixelOf(missing);
  colors[ZERO_CODE] = pixelOf(ZERO_COLOR);
  colors[INFINITE_CODE] = pixelOf(INFINITE_COLORS[0]);
  colors[NAN_CODE] = pixelOf(NAN_COLORS[0]);
  return colors;
}

function cssColor(diverging, place) {
  const [red, green, blue] = mix(diverging ? DIVERGING : SEQUENTIAL, place);
  return `rgb(${red} ${green} ${blue})`;
}

export function pixelOf(color) {
  return pixel(parseColor(color));
}

function parseStops(text) {
  return text.match(/.{6}/g).map((stop) => parseColor(`#${stop}`));
}

function parseColor(text) {
  return [1, 3, 5].map((start) => parseInt(text.slice(start, start + 2), 16));
}

function mix(stops, place) {
  const scaled = clamp(place, 0, 1) * (stops.length - 1);
  const index = Math.min(Math.floor(scaled), stops.length - 2);
  const share = scaled - index;
  return stops[index].map((low, i) => Math.round(low + (stops[index + 1][i] - low) * share));
}

function pixel([red, green, blue]) {
  return ((255 << 24) | (blue << 16) | (green << 8) | red) >>> 0;
}

const SAMPLE = 50_000;
const MAX_DECADES = 12;
const OUTSIDE = 0.002; // share of the values at either end that may lie beyond the scale

/**
 * A diverging scale has a middle, for values relative to a median.
 * @typedef {{diverging: boolean, log: boolean, low: number, high: number}} Scale; `isCut`: whether values lie beyond its ends
 */

/**
 * A scale that suits the values of each run, so that they can be compared.
 * @param {Float32Array[]} fields values; relative ones are ratios, or 1 + difference
 * @returns {Scale}
 */
export function makeScale(statistic, mode, fields) {
  const values = sample(fields, statistic.log);
  const diverging = mode !== "value";
  if (diverging) return divergingScale(statistic.log, values);
  if (!statistic.log) {
    const top = values.at(-1) ?? 1;
    return { diverging, log: false, low: 0, high: top >= 0.5 ? 1 : top >= 0.1 ? 0.5 : 0.1 };
  }
  if (!values.length) return { diverging, log: true, low: 1e-3, high: 1 };
  const parts = fields.map((field) => sample([field], true)).filter((part) => part.length).map(fullest);
  const least = Math.log10(Math.min(...parts.map(([first]) => first)));
  const most = Math.log10(Math.max(...parts.map(([, last]) => last)));
  // What hardly changes is in the middle of the scale rather than at an end.
  const margin = most - least < 0.05 ? 0.5 : 0;
  const high = Math.pow(10, Math.ceil(most + margin - 1e-6));
  const low = Math.min(Math.pow(10, Math.floor(least - margin + 1e-6)), high / 10);
  const isCut = [values[0] < low * (1 - 1e-6), values.at(-1) > high * (1 + 1e-6)];
  return { diverging, log: true, low, high, isCut };
}

/** The same scale, extended to whole decades around values beyond it. */
export function extended(scale, values) {
  if (!scale.log || scale.diverging) return scale;
  let { low, high } = scale;
  for (const value of values) {
    if (value > 0) low = Math.min(low, value);
    if (value < Infinity) high = Math.max(high, value);
  }
  return { ...scale, low: 10 ** Math.floor(Math.log10(low) + 1e-6), high: 10 ** Math.ceil(Math.log10(high) - 1e-6) };
}

/** The function from values to places on a scale, 0 to 1. */
export function placesOn({ log, low, high }) {
  const size = log ? Math.log(high / low) : high - low;
  return (value) => clamp((log ? Math.log(value / low) : value - low) / size, 0, 1);
}

/** The code of each value; see `MISSING_CODE`. */
export function encode(scale, values) {
  const codes = new Uint8Array(values.length);
  const span = LAST_CODE - FIRST_CODE;
  const placeOf = placesOn(scale);
  for (let i = 0; i < values.length; i++) {
    const value = values[i];
    if (value < 0) codes[i] = MISSING_CODE;
    else if (value === 0 && scale.log) codes[i] = ZERO_CODE;
    else if (value === Infinity) codes[i] = INFINITE_CODE;
    else if (value !== value) codes[i] = NAN_CODE;
    else codes[i] = FIRST_CODE + Math.round(placeOf(value) * span);
  }
  return codes;
}

export function scaleTicks(scale) {
  const { log, low, high } = scale;
  const values = log ? logTicks(low, high, 7) : [0, 0.25, 0.5, 0.75, 1].map((place) => low + (high - low) * place);
  const placeOf = placesOn(scale);
  return values.map((value) => ({ place: placeOf(value), text: scaleText(scale, value) }));
}

/** A value on a scale: as it is, or as a ratio or difference. */
export function scaleText(scale, value) {
  if (!scale.diverging) return scale.log ? formatNumber(value) : `${formatNumber(value * 100)} %`;
  if (scale.log) return value >= 1 ? `×${formatNumber(value)}` : `÷${formatNumber(1 / value)}`;
  const percent = Math.round((value - 1) * 100);
  return `${percent > 0 ? "+" : percent < 0 ? "−" : "±"}${Math.abs(percent)} %`;
}

function divergingScale(log, values) {
  const ends = [OUTSIDE, 1 - OUTSIDE].map((share) => values[Math.round(share * (values.length - 1))] ?? 1);
  const farthest = Math.max(...ends.map((end) => Math.abs(log ? Math.log10(end) : end - 1)));
  if (!log) {
    const reach = farthest > 0.5 ? 1 : farthest > 0.1 ? 0.5 : 0.1;
    return { diverging: true, log, low: 1 - reach, high: 1 + reach };
  }
  const decades = clamp(Math.ceil(farthest), 1, MAX_DECADES / 2);
  return { diverging: true, log, low: Math.pow(10, -decades), high: Math.pow(10, decades) };
}

/**
 * The ends of the part of ascending positive numbers that a scale shows: nearly all, or the twelve
 * decades with most of them. An explosion lies beyond them, the usual values do not.
 */
function fullest(values) {
  let [first, last] = [OUTSIDE, 1 - OUTSIDE].map((q) => Math.round(q * (values.length - 1)));
  const reach = Math.pow(10, MAX_DECADES);
  if (values[last] <= values[first] * reach) return [values[first], values[last]];
  let most = 0;
  for (let low = first, end = first; end < values.length; low++) {
    while (end < values.length && values[end] <= values[low] * reach) end++;
    if (end - low > most) [most, first, last] = [end - low, low, end - 1];
  }
  return [values[first], values[last]];
}

/** Some of the finite values (above zero where magnitudes count), ascending. */
function sample(fields, positive) {
  const total = fields.reduce((sum, field) => sum + field.length, 0);
  // Multiples of an irrational stride do not fall into step with the number of layers.
  const stride = total > SAMPLE ? (total / SAMPLE) * Math.SQRT2 : 1;
  const found = new Float32Array(Math.ceil(total / stride) + fields.length);
  let count = 0;
  for (const field of fields) {
    for (let at = 0; at < field.length; at += stride) {
      const value = field[Math.floor(at)];
      if (value < Infinity && (positive ? value > 0 : value >= 0)) found[count++] = value;
    }
  }
  return found.subarray(0, count).sort();
}

/** Values on a scale that are marked: the usual value of a statistic, or the ends of a share. */
export function usualOf({ usual, unit }, { diverging, low, high }) {
  const values = unit === "share" ? [0, 1] : [usual ?? -1];
  return values.filter((value) => !diverging && value >= low && value <= high);
}

const BAR = { x: 20, y: 7, width: 320, height: 12 }; // of colors

/** The color scale with its ticks, and triangles at usual values. */
export function drawScale(canvas, scale, theme, usual) {
  const context = prepare(canvas, BAR.width + 40, 38);
  for (let x = 0; x < BAR.width; x++) {
    context.fillStyle = cssColor(scale.diverging, x / (BAR.width - 1));
    context.fillRect(BAR.x + x, BAR.y, 1.5, BAR.height);
  }
  const xAt = (place) => BAR.x + place * BAR.width;
  const placeOf = placesOn(scale);
  const cut = [`≤ ${scaleText(scale, scale.low)}`, `≥ ${scaleText(scale, scale.high)}`];
  const ends = cut.map((text, end) => ({ x: xAt(end), text })).filter((_, end) => scale.isCut?.[end]);
  const ticks = scaleTicks(scale).map(({ place, text }) => ({ x: xAt(place), text }));
  const others = ticks.filter(({ x }) => ends.every((end) => Math.abs(end.x - x) > 2 * BAR.x));
  drawTicks(context, theme, BAR, [...others, ...ends], BAR.x, BAR.x);
  context.fillStyle = theme.usual;
  for (const value of usual) drawShape(context, xAt(placeOf(value)), 0, [[-5, 0], [5, 0], [0, BAR.y]]);
}
