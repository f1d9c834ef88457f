// From values to places on the color scale, and back for the legend.

import { formatNumber } from "./format.js";
import {
  FIRST_CODE,
  INFINITE_CODE,
  LAST_CODE,
  MISSING_CODE,
  NAN_CODE,
  ZERO_CODE,
} from "./palette.js";

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
 * @param {string} mode `value`, `own` or `depth`
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

/** The code of each value; see `palette.js`. */
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
  return (scale.log ? logTicks(scale) : linearTicks(scale)).map((value) => ({
    place: placeOf(scale, value),
    text: tickText(scale, value),
  }));
}

function tickText(scale, value) {
  if (!scale.diverging) return scale.log ? formatNumber(value) : `${formatNumber(value * 100)} %`;
  if (scale.log) return value >= 1 ? `×${formatNumber(value)}` : `÷${formatNumber(1 / value)}`;
  const percent = Math.round((value - 1) * 100);
  return `${percent > 0 ? "+" : percent < 0 ? "−" : "±"}${Math.abs(percent)} %`;
}

function logTicks({ low, high }) {
  const first = Math.ceil(Math.log10(low) - 1e-6);
  const last = Math.floor(Math.log10(high) + 1e-6);
  const stride = Math.max(1, Math.ceil((last - first) / 6));
  const ticks = [];
  for (let power = first; power <= last; power += stride) ticks.push(Math.pow(10, power));
  return ticks.length > 1 ? ticks : [low, Math.sqrt(low * high), high];
}

function linearTicks({ low, high }) {
  return [0, 0.25, 0.5, 0.75, 1].map((place) => low + (high - low) * place);
}

function divergingScale(log, values) {
  if (!log) {
    const farthest = Math.max(
      ...[OUTSIDE, 1 - OUTSIDE].map((q) => Math.abs((quantile(values, q) ?? 1) - 1)),
    );
    const reach = farthest > 0.5 ? 1 : farthest > 0.1 ? 0.5 : 0.1;
    return { diverging: true, log, low: 1 - reach, high: 1 + reach };
  }
  const ends = [OUTSIDE, 1 - OUTSIDE].map((q) => Math.abs(Math.log10(quantile(values, q) ?? 1)));
  const decades = Math.min(Math.max(Math.ceil(Math.max(...ends)), 1), MAX_DECADES / 2);
  return { diverging: true, log, low: Math.pow(10, -decades), high: Math.pow(10, decades) };
}

/**
 * The ends of the part of ascending positive numbers that a scale shows: nearly all, or the twelve
 * decades with most of them. What explodes lies beyond those rather than what is usual.
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
