// Color scales: from values to colors.

import { INFINITE_COLORS, NAN_COLORS, VIRIDIS, ZERO_COLOR } from "./colors.js";
import { formatNumber } from "./format.js";
import { logTicks, prepare, setText } from "./canvas.js";

/** Codes of a cell, in the order in which they win where several cells share a pixel. */
export const MISSING_CODE = 0;
export const ZERO_CODE = 1;
export const FIRST_CODE = 2;
export const LAST_CODE = 253;
export const INFINITE_CODE = 254;
export const NAN_CODE = 255;

const SEQUENTIAL = parseStops(VIRIDIS);
// From blue over gray to orange, nearly even in OKLab, dark at both ends alike.
const DIVERGING = parseStops("08407e2166ac4393c392c5deddddddfdb863e08214b358067f3b08");

/**
 * Color of each code, as the pixels of `ImageData` hold it.
 * @param {boolean} diverging
 * @param {string} missing color of cells that were not measured
 */
export function palette(diverging, missing) {
  const colors = new Uint32Array(256);
  const stops = diverging ? DIVERGING : SEQUENTIAL;
  for (let code = FIRST_CODE; code <= LAST_CODE; code++) {
    colors[code] = pixel(mix(stops, (code - FIRST_CODE) / (LAST_CODE - FIRST_CODE)));
  }
  colors[MISSING_CODE] = pixel(parseColor(missing));
  colors[ZERO_CODE] = pixel(parseColor(ZERO_COLOR));
  colors[INFINITE_CODE] = pixel(parseColor(INFINITE_COLORS[0]));
  colors[NAN_CODE] = pixel(parseColor(NAN_COLORS[0]));
  return colors;
}

/** A CSS color for a place between 0 and 1 on the scale. */
export function cssColor(diverging, place) {
  const [red, green, blue] = mix(diverging ? DIVERGING : SEQUENTIAL, place);
  return `rgb(${red} ${green} ${blue})`;
}

/** `#rrggbb` as a pixel of `ImageData`. */
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
  const scaled = Math.min(Math.max(place, 0), 1) * (stops.length - 1);
  const index = Math.min(Math.floor(scaled), stops.length - 2);
  const share = scaled - index;
  return stops[index].map((low, i) => Math.round(low + (stops[index + 1][i] - low) * share));
}

function pixel([red, green, blue]) {
  return ((255 << 24) | (blue << 16) | (green << 8) | red) >>> 0;
}

const SAMPLE = 200_000;
const MAX_DECADES = 12;
const OUTSIDE = 0.002; // share of the values at either end that may lie beyond the scale

/**
 * @typedef {Object} Scale
 * @property {boolean} diverging whether it has a middle: values relative to a median
 * @property {boolean} log
 * @property {number} low
 * @property {number} high
 */

/**
 * A scale that suits all the fields, so that runs can be compared.
 * @param {{log: boolean}} statistic
 * @param {string} mode `value`, `own`, `depth` or `run`
 * @param {Float32Array[]} fields values; relative ones are ratios, or 1 + difference
 * @returns {Scale}
 */
export function makeScale(statistic, mode, fields) {
  const values = sample(fields, statistic.log);
  const diverging = mode !== "value";
  if (diverging) return divergingScale(statistic.log, values);
  if (!statistic.log) {
    const top = values.length ? values[values.length - 1] : 1;
    return { diverging, log: false, low: 0, high: top >= 0.5 ? 1 : top >= 0.1 ? 0.5 : 0.1 };
  }
  if (!values.length) return { diverging, log: true, low: 1e-3, high: 1 };
  const [least, most] = fullest(values).map(Math.log10);
  // What hardly changes is in the middle of the scale rather than at an end.
  const margin = most - least < 0.05 ? 0.5 : 0;
  const high = Math.pow(10, Math.ceil(most + margin - 1e-6));
  const low = Math.min(Math.pow(10, Math.floor(least - margin + 1e-6)), high / 10);
  return { diverging, log: true, low, high };
}

/** Place of a positive number on the scale, 0 to 1. */
export function placeOf(scale, value) {
  const place = scale.log
    ? Math.log(value / scale.low) / Math.log(scale.high / scale.low)
    : (value - scale.low) / (scale.high - scale.low);
  return Math.min(Math.max(place, 0), 1);
}

/** The code of each value; see `MISSING_CODE`. */
export function encode(scale, values) {
  const codes = new Uint8Array(values.length);
  const factor = scale.log ? 1 / Math.log(scale.high / scale.low) : 1 / (scale.high - scale.low);
  const zeroIsSpecial = scale.log;
  const span = LAST_CODE - FIRST_CODE;
  for (let i = 0; i < values.length; i++) {
    const value = values[i];
    if (value < 0) codes[i] = MISSING_CODE;
    else if (value === 0 && zeroIsSpecial) codes[i] = ZERO_CODE;
    else if (value === Infinity) codes[i] = INFINITE_CODE;
    else if (value !== value) codes[i] = NAN_CODE;
    else {
      const place = scale.log ? Math.log(value / scale.low) * factor : (value - scale.low) * factor;
      codes[i] = FIRST_CODE + Math.round((place < 0 ? 0 : place > 1 ? 1 : place) * span);
    }
  }
  return codes;
}

/** Up to about seven places with a text for the legend. */
export function scaleTicks(scale) {
  return (scale.log ? logTicks(scale.low, scale.high, 7) : linearTicks(scale)).map((value) => ({
    place: placeOf(scale, value),
    text: scaleText(scale, value),
  }));
}

/** A value on a scale: as it is, or as a ratio or difference. */
export function scaleText(scale, value) {
  if (!scale.diverging) return scale.log ? formatNumber(value) : `${formatNumber(value * 100)} %`;
  if (scale.log) return value >= 1 ? `×${formatNumber(value)}` : `÷${formatNumber(1 / value)}`;
  const percent = Math.round((value - 1) * 100);
  return `${percent > 0 ? "+" : percent < 0 ? "−" : "±"}${Math.abs(percent)} %`;
}

function linearTicks({ low, high }) {
  return [0, 0.25, 0.5, 0.75, 1].map((place) => low + (high - low) * place);
}

function divergingScale(log, values) {
  if (!log) {
    const farthest = Math.max(...[OUTSIDE, 1 - OUTSIDE].map((q) => Math.abs((quantile(values, q) ?? 1) - 1)));
    const reach = farthest > 0.5 ? 1 : farthest > 0.1 ? 0.5 : 0.1;
    return { diverging: true, log, low: 1 - reach, high: 1 + reach };
  }
  const ends = [OUTSIDE, 1 - OUTSIDE].map((q) => Math.abs(Math.log10(quantile(values, q) ?? 1)));
  const decades = Math.min(Math.max(Math.ceil(Math.max(...ends)), 1), MAX_DECADES / 2);
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
  // A prime stride does not fall into step with the number of layers.
  const stride = total > SAMPLE ? nextPrime(Math.ceil(total / SAMPLE)) : 1;
  const found = new Float32Array(Math.ceil(total / stride) + fields.length);
  let count = 0;
  for (const field of fields) {
    for (let i = 0; i < field.length; i += stride) {
      const value = field[i];
      if (value < Infinity && (positive ? value > 0 : value >= 0)) found[count++] = value;
    }
  }
  return found.subarray(0, count).sort();
}

function quantile(sorted, share) {
  return sorted[Math.round(share * (sorted.length - 1))];
}

function nextPrime(number) {
  for (let candidate = number; ; candidate++) {
    let prime = candidate > 1;
    for (let i = 2; i * i <= candidate && prime; i++) prime = candidate % i !== 0;
    if (prime) return candidate;
  }
}

/** Values on a scale that are marked: the usual value of a statistic, or the ends of a share. */
export function usualOf({ usual, unit }, { diverging, low, high }) {
  const values = unit === "share" ? [0, 1] : [usual ?? -1];
  return values.filter((value) => !diverging && value >= low && value <= high);
}

const WIDTH = 320;
const BAR = 7; // where the colors begin
const SCALE_HEIGHT = 36;

/** The color scale with its ticks, and triangles at usual values. */
export function drawScale(canvas, scale, theme, usual) {
  const context = prepare(canvas, WIDTH + 40, SCALE_HEIGHT);
  for (let x = 0; x < WIDTH; x++) {
    context.fillStyle = cssColor(scale.diverging, x / (WIDTH - 1));
    context.fillRect(20 + x, BAR, 1.5, 12);
  }
  setText(context, theme, "center", "top");
  for (const { place, text } of scaleTicks(scale)) {
    context.fillRect(20 + place * WIDTH - 0.5, BAR + 12, 1, 3);
    context.fillText(text, 20 + place * WIDTH, BAR + 16);
  }
  context.fillStyle = theme.usual;
  for (const value of usual) {
    const x = 20 + placeOf(scale, value) * WIDTH;
    context.beginPath();
    for (const dx of [-5, 5]) context.lineTo(x + dx, 0);
    context.lineTo(x, BAR);
    context.fill();
  }
}

/** A title for the colors. */
export function legendTitle(statistic, mode) {
  const relation = {
    own: ", ratio to the layer's own median",
    depth: ", ratio to the median layer",
    run: ", ratio to the other run",
  };
  return statistic.title + (relation[mode] ?? "");
}
