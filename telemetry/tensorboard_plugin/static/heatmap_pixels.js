// Cells -> pixels. Where several cells share a pixel, the one with the largest code wins: NaN over
// infinity over numbers over what was not measured. On a diverging scale it is the one farthest
// from the middle.

import { INFINITE_COLORS, NAN_COLORS } from "./colors.js";
import { FIRST_CODE, INFINITE_CODE, LAST_CODE, NAN_CODE, pixelOf } from "./palette.js";
import { columnAt, endOf, rowOf } from "./field.js";

const STRIPES = {
  [NAN_CODE]: NAN_COLORS.map(pixelOf),
  [INFINITE_CODE]: INFINITE_COLORS.map(pixelOf),
};

/**
 * Fills an image with the visible part of a field.
 * @param {ImageData} image
 * @param {import("./field.js").Field} field
 * @param {Uint8Array} codes of the field's values
 * @param {Uint32Array} colors of each code
 * @param {import("./rows.js").Row[]} rows
 * @param {{step0: number, step1: number, row0: number, row1: number}} view
 * @param {boolean} diverging
 */
export function paint(image, field, codes, colors, rows, view, diverging) {
  const { width, height } = image;
  const pixels = new Uint32Array(image.data.buffer);
  const rank = ranks(diverging);
  const fieldRows = fieldRowsOf(rows, field, view);
  const top = pixelTops(view, fieldRows.length, height);
  const columns = columnRanges(field.steps, view, width);
  const column = new Uint8Array(field.rows);
  const shown = new Uint8Array(fieldRows.length);
  let previous = -1;
  for (let x = 0; x < width; x++) {
    const first = columns[2 * x];
    const last = columns[2 * x + 1];
    // Many pixels of one step are alike.
    if (previous < 0 || first !== columns[2 * previous] || last !== columns[2 * previous + 1]) {
      poolColumns(codes, field.rows, first, last, rank, column);
      poolRows(column, fieldRows, rank, shown);
    }
    previous = x;
    for (let y = 0; y < height; y++) {
      const code = poolPixel(shown, top[y], top[y + 1], rank);
      const stripes = STRIPES[code];
      const phase = code === NAN_CODE ? x + y : x - y + 8192;
      pixels[y * width + x] = stripes ? stripes[(phase & 7) < 2 ? 1 : 0] : colors[code];
    }
  }
}

/** Order in which codes win, by code. */
function ranks(diverging) {
  const rank = new Uint16Array(256);
  const middle = (FIRST_CODE + LAST_CODE) / 2;
  for (let code = 0; code < 256; code++) {
    const isNumber = code >= FIRST_CODE && code <= LAST_CODE;
    rank[code] = diverging && isNumber ? 2 + Math.abs(code - middle) : code;
  }
  return rank;
}

/** For each visible row the field's rows behind it; −1 for none. */
function fieldRowsOf(rows, field, view) {
  const first = Math.floor(view.row0);
  const last = Math.min(Math.ceil(view.row1), rows.length);
  return rows.slice(first, last).map((row) => {
    const found = new Set(row.layers.map((layer) => rowOf(field, layer)));
    found.delete(-1);
    return Int32Array.from(found);
  });
}

/** For each pixel's upper edge the visible row there; one more for the last lower edge. */
function pixelTops(view, count, height) {
  const first = Math.floor(view.row0);
  const tops = new Float64Array(height + 1);
  for (let y = 0; y <= height; y++) {
    tops[y] = Math.min(view.row0 - first + ((view.row1 - view.row0) * y) / height, count);
  }
  return tops;
}

/** First and last column behind each pixel column; last < first for none. */
function columnRanges(steps, view, width) {
  const ranges = new Int32Array(2 * width);
  const end = endOf(steps);
  for (let x = 0; x < width; x++) {
    const left = view.step0 + ((view.step1 - view.step0) * x) / width;
    const right = view.step0 + ((view.step1 - view.step0) * (x + 1)) / width;
    const isBeyond = left >= end || !steps.length;
    ranges[2 * x] = isBeyond ? 0 : Math.max(columnAt(steps, left), 0);
    // A pixel's right edge belongs to the next one.
    ranges[2 * x + 1] = isBeyond ? -1 : columnAt(steps, right - 1e-9 * (right - left + 1));
  }
  return ranges;
}

function poolColumns(codes, rowCount, first, last, rank, column) {
  column.fill(0);
  for (let c = first; c <= last; c++) {
    const start = c * rowCount;
    for (let row = 0; row < rowCount; row++) {
      const code = codes[start + row];
      if (rank[code] > rank[column[row]]) column[row] = code;
    }
  }
}

function poolRows(column, fieldRows, rank, shown) {
  for (let i = 0; i < fieldRows.length; i++) {
    const behind = fieldRows[i];
    let best = 0;
    for (let j = 0; j < behind.length; j++) {
      const code = column[behind[j]];
      if (rank[code] > rank[best]) best = code;
    }
    shown[i] = best;
  }
}

function poolPixel(shown, top, bottom, rank) {
  const first = Math.floor(top);
  const last = Math.max(Math.ceil(bottom - 1e-9), first + 1);
  let best = 0;
  // A row at least a pixel high is drawn by the pixel's upper edge: no blur, no lost lines.
  const end = bottom - top > 1 ? Math.min(last, shown.length) : Math.min(first + 1, shown.length);
  for (let row = first; row < end; row++) {
    if (rank[shown[row]] > rank[best]) best = shown[row];
  }
  return best;
}
