// Where a run's story is: the steps around a fault, and the first value that is not finite.

const AROUND_STEPS = 20;
const AROUND_COLUMNS = 5; // of a statistic that is measured less often than at every step
const SHORT = 60; // columns that need no zoom

/** The view of all rows at the steps around one. */
export function aroundStep(step, whole, steps) {
  const gap = steps.length > 1 ? (steps[steps.length - 1] - steps[0]) / (steps.length - 1) : 1;
  const reach = Math.max(AROUND_STEPS, AROUND_COLUMNS * gap);
  return { ...whole, step0: step - reach, step1: step + reach + 1 };
}

/**
 * The first column that holds NaN or infinity.
 * @param {import("./field.js").Field} field
 * @returns {{column: number, step: number, rows: number[], share: number}|null} rows of the field
 *   in which it is, and the share of the columns from there on that are like it
 */
export function firstNonfinite(field) {
  const { values, rows, steps } = field;
  let index = 0;
  while (values[index] < Infinity) index += 1;
  if (index >= values.length) return null;
  const column = Math.floor(index / rows);
  const found = [];
  for (let row = 0; row < rows; row++) {
    if (!(values[column * rows + row] < Infinity)) found.push(row);
  }
  let like = 0;
  for (let other = column; other < steps.length; other++) {
    const end = (other + 1) * rows;
    for (let i = other * rows; i < end; i++) {
      if (!(values[i] < Infinity)) {
        like += 1;
        break;
      }
    }
  }
  return { column, step: steps[column], rows: found, share: like / steps.length };
}

/** The view to open with: null for everything; the beginning of what fills most of the picture. */
export function openingView(field, first, alerts, whole) {
  if (!first || field.steps.length <= SHORT || first.share < 0.5) return null;
  const errors = alerts.filter(({ severity, step }) => severity === "error" && step <= first.step);
  const step = errors.reduce((least, alert) => Math.min(least, alert.step), first.step);
  return aroundStep(step, whole, field.steps);
}
