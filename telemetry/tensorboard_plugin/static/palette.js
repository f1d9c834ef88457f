// Colors of the cells: perceptually even, and distinct for color-blind people.

import { INFINITE_COLORS, NAN_COLORS, VIRIDIS, ZERO_COLOR } from "./colors.js";

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
 * @param {string} missing color of what was not measured
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
