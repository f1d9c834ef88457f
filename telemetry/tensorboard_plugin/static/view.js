// The visible part of the picture, and zooming.

import { clamp } from "./format.js";

/** @typedef {{step0: number, step1: number, row0: number, row1: number}} View steps and rows may be fractions */

const MIN_STEPS = 2;
const MIN_ROWS = 1;

export function viewOf([step0, step1], [row0, row1]) {
  return { step0, step1, row0, row1 };
}

export function wholeView(extents, rowCount) {
  const ends = extents.flat();
  return viewOf(ends.length ? [Math.min(...ends), Math.max(...ends)] : [0, 1], [0, Math.max(rowCount, 1)]);
}

/** A view that lies inside of the whole and is not too small; null if it is the whole. */
export function limit(view, whole) {
  const limited = viewOf(
    limitSpan(view.step0, view.step1, whole.step0, whole.step1, MIN_STEPS),
    limitSpan(view.row0, view.row1, whole.row0, whole.row1, MIN_ROWS),
  );
  const isWhole = Object.keys(whole).every((key) => Math.abs(limited[key] - whole[key]) < 1e-6);
  return isWhole ? null : limited;
}

/** The same view of a run with fewer rows: the visible rows fill the picture. */
export function clampRows(view, rowCount) {
  const row1 = Math.max(Math.min(view.row1, rowCount), 1);
  return { ...view, row0: Math.min(view.row0, row1 - 1), row1 };
}

/** Larger (`factor` > 1) or smaller around a place, given as shares of the view. */
export function scaleView(view, factor, x, y) {
  const around = (low, high, share) => {
    const center = low + (high - low) * clamp(share, 0, 1);
    return [center - (center - low) * factor, center + (high - center) * factor];
  };
  return viewOf(around(view.step0, view.step1, x), around(view.row0, view.row1, y));
}

/** Moved by shares of its size. */
export function panView(view, dx, dy, whole) {
  const moved = (low, high, share, first, last) => {
    const by = (high - low) * share;
    return limitSpan(low + by, high + by, first, last);
  };
  return viewOf(
    moved(view.step0, view.step1, dx, whole.step0, whole.step1),
    moved(view.row0, view.row1, dy, whole.row0, whole.row1),
  );
}

/** The same view, moved so that a cell is inside. */
export function reveal(view, step, row, whole) {
  const outside = (value, low, high) => value - clamp(value, low, high);
  const dx = outside(step, view.step0, view.step1 - (view.step1 - view.step0) / 50);
  const dy = row < 0 ? 0 : outside(row + 0.5, view.row0 + 0.5, view.row1 - 0.5);
  if (!dx && !dy) return view;
  const [steps, rows] = [view.step1 - view.step0, view.row1 - view.row0];
  return panView(view, dx / steps, dy / rows, whole);
}

function limitSpan(low, high, first, last, least = 0) {
  const size = Math.min(Math.max(high - low, least), last - first);
  const start = clamp(low, first, last - size);
  return [start, start + size];
}

const AROUND_STEPS = 20;
const AROUND_COLUMNS = 5; // of a statistic that is measured less often than at every step

export function aroundStep(step, whole, steps) {
  const gap = steps.length > 1 ? (steps[steps.length - 1] - steps[0]) / (steps.length - 1) : 1;
  const reach = Math.max(AROUND_STEPS, AROUND_COLUMNS * gap);
  return { ...whole, step0: step - reach, step1: step + reach + 1 };
}
