// The visible part of the picture, zooming, and the part to open with.

const MIN_STEPS = 2;
const MIN_ROWS = 1;

/** The whole picture. */
export function wholeView(extents, rowCount) {
  const known = extents.filter((extent) => extent !== null);
  if (!known.length) return { step0: 0, step1: 1, row0: 0, row1: Math.max(rowCount, 1) };
  return {
    step0: Math.min(...known.map(([first]) => first)),
    step1: Math.max(...known.map(([, end]) => end)),
    row0: 0,
    row1: Math.max(rowCount, 1),
  };
}

/** A view that lies inside of the whole and is not too small; null if it is the whole. */
export function limit(view, whole) {
  const [step0, step1] = limitSpan(view.step0, view.step1, whole.step0, whole.step1, MIN_STEPS);
  const [row0, row1] = limitSpan(view.row0, view.row1, whole.row0, whole.row1, MIN_ROWS);
  const limited = { step0, step1, row0, row1 };
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
    const center = low + (high - low) * Math.min(Math.max(share, 0), 1);
    return [center - (center - low) * factor, center + (high - center) * factor];
  };
  const [step0, step1] = around(view.step0, view.step1, x);
  const [row0, row1] = around(view.row0, view.row1, y);
  return { step0, step1, row0, row1 };
}

/** Moved by shares of its size. */
export function panView(view, dx, dy, whole) {
  const shift = (low, high, share, first, last) => {
    const wanted = (high - low) * share;
    return Math.min(Math.max(wanted, first - low), last - high);
  };
  const steps = shift(view.step0, view.step1, dx, whole.step0, whole.step1);
  const rows = shift(view.row0, view.row1, dy, whole.row0, whole.row1);
  return {
    step0: view.step0 + steps,
    step1: view.step1 + steps,
    row0: view.row0 + rows,
    row1: view.row1 + rows,
  };
}

/** The same view, moved so that a cell is inside. */
export function reveal(view, step, row, whole) {
  const dx = outside(step, view.step0, view.step1 - (view.step1 - view.step0) / 50);
  const dy = row < 0 ? 0 : outside(row + 0.5, view.row0 + 0.5, view.row1 - 0.5);
  if (!dx && !dy) return view;
  const [steps, rows] = [view.step1 - view.step0, view.row1 - view.row0];
  return panView(view, dx / steps, dy / rows, whole);
}

function outside(value, low, high) {
  if (value < low) return value - low;
  return value > high ? value - high : 0;
}

function limitSpan(low, high, first, last, least) {
  const size = Math.min(Math.max(high - low, least), last - first);
  const start = Math.min(Math.max(low, first), last - size);
  return [start, start + size];
}

const AROUND_STEPS = 20;
const AROUND_COLUMNS = 5; // of a statistic that is measured less often than at every step
const SHORT = 60; // columns that need no zoom

/** The view of all rows at the steps around one. */
export function aroundStep(step, whole, steps) {
  const gap = steps.length > 1 ? (steps[steps.length - 1] - steps[0]) / (steps.length - 1) : 1;
  const reach = Math.max(AROUND_STEPS, AROUND_COLUMNS * gap);
  return { ...whole, step0: step - reach, step1: step + reach + 1 };
}

/** The view to open with: null for everything; the first NaN if NaN fills most of the picture. */
export function openingView(field, first, alerts, whole) {
  if (!first || field.steps.length <= SHORT || first.share < 0.5) return null;
  const errors = alerts.filter(({ severity, step }) => severity === "error" && step <= first.step);
  const step = errors.reduce((least, alert) => Math.min(least, alert.step), first.step);
  return aroundStep(step, whole, field.steps);
}
