// Cells -> pixels. Where several cells share a pixel, one wins as in a folded group: see
// `valuesOfRows`.

import { columnAt, endOf } from "./field.js";
import { FIRST_CODE, INFINITE_CODE, INFINITE_COLORS, LAST_CODE, NAN_CODE, NAN_COLORS, palette, pixelOf } from "./scale.js";
import { memo } from "./state.js";

const STRIPES = {
  [NAN_CODE]: NAN_COLORS.map(pixelOf),
  [INFINITE_CODE]: INFINITE_COLORS.map(pixelOf),
};

// Most of a redraw, and a new selection changes none of it.
const imageOf = memo((codes, steps, rowCount, diverging, missing, width, height, step0, step1, row0, row1) => {
  const image = new ImageData(width, height);
  paint(image, steps, codes, palette(diverging, missing), rowCount, { step0, step1, row0, row1 }, diverging);
  return image;
});

/**
 * Paints cells into a box of a canvas.
 * @param {Uint8Array} codes of the rows' values, column after column
 * @param {Object} cells `steps`, `rowCount`, `view`, `scale`, and `missing`, the color without a value
 */
export function paintIn(context, box, codes, { steps, rowCount, view, scale, missing }) {
  const { a: ratio } = context.getTransform();
  const [x, y, width, height] = [box.x, box.y, box.width, box.height].map((side) => Math.round(side * ratio));
  if (width < 1 || height < 1) return;
  const { step0, step1, row0, row1 } = view;
  const image = imageOf(codes, steps, rowCount, scale.diverging, missing, width, height, step0, step1, row0, row1);
  context.putImageData(image, x, y);
}

/** Fills an image with the visible part of the picture. `colors` are those of each code. */
function paint(image, steps, codes, colors, rowCount, view, diverging) {
  const { width, height } = image;
  const pixels = new Uint32Array(image.data.buffer);
  const rank = ranks(diverging);
  const firstRow = Math.floor(view.row0);
  const shown = new Uint8Array(Math.min(Math.ceil(view.row1), rowCount) - firstRow);
  const top = pixelTops(view, shown.length, height);
  const columns = columnRanges(steps, view, width);
  let previous = -1;
  for (let x = 0; x < width; x++) {
    const first = columns[2 * x];
    const last = columns[2 * x + 1];
    // Many pixels of one step are alike.
    if (previous < 0 || first !== columns[2 * previous] || last !== columns[2 * previous + 1]) {
      shown.fill(0);
      for (let c = first; c <= last; c++) poolColumn(codes, c * rowCount + firstRow, rank, shown);
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
  const middle = (FIRST_CODE + LAST_CODE) / 2;
  return Uint16Array.from({ length: 256 }, (_, code) => {
    const isNumber = code >= FIRST_CODE && code <= LAST_CODE;
    return diverging && isNumber ? 2 + Math.abs(code - middle) : code;
  });
}

/** For each pixel's upper edge the visible row there; one more for the last lower edge. */
function pixelTops(view, count, height) {
  const first = Math.floor(view.row0);
  const top = (_, y) => Math.min(view.row0 - first + ((view.row1 - view.row0) * y) / height, count);
  return Float64Array.from({ length: height + 1 }, top);
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

function poolColumn(codes, start, rank, shown) {
  for (let row = 0; row < shown.length; row++) {
    const code = codes[start + row];
    if (rank[code] > rank[shown[row]]) shown[row] = code;
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
