// One statistic of all layers at all steps, and the same relative to medians.

/**
 * A field has `steps`, the first one of each column, ascending; `values`, column after column, −1 where not
 * measured; the number of `rows`, and the `firstLayer` of the first one. A reduced one has several layers
 * behind a row, `layerFactor`, or measured steps behind a column, `stepFactor`.
 * @typedef {Object} Field
 */

export function isThinned(field) {
  return field.layerFactor > 1 || field.stepFactor > 1;
}

/** @returns {Field} the columns of both; those of `newer` follow */
export function append(field, newer) {
  const values = new Float32Array(field.values.length + newer.values.length);
  values.set(field.values);
  values.set(newer.values, field.values.length);
  return { ...field, steps: Float64Array.from([...field.steps, ...newer.steps]), values };
}

/** Row of a layer, −1 if the field does not reach it. */
export function rowOf(field, layer) {
  const row = Math.floor((layer - field.firstLayer) / field.layerFactor);
  return row >= 0 && row < field.rows ? row : -1;
}

/** Column that holds at a step; −1 before the first. */
export function columnAt(steps, step) {
  let low = 0;
  let high = steps.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (steps[middle] <= step) low = middle + 1;
    else high = middle;
  }
  return low - 1;
}

export function measuredLayers(field) {
  const found = new Set();
  for (let row = 0; row < field.rows; row++) {
    let index = row;
    while (index < field.values.length && field.values[index] < 0) index += field.rows;
    if (index >= field.values.length) continue;
    const first = field.firstLayer + row * field.layerFactor;
    for (let i = 0; i < field.layerFactor; i++) found.add(first + i);
  }
  return found;
}

/** Value of a layer at a step; −1 if it was not measured. */
export function valueAt(field, layer, step) {
  const row = rowOf(field, layer);
  const column = columnAt(field.steps, step);
  return row < 0 || column < 0 ? -1 : field.values[column * field.rows + row];
}

/**
 * The values of the picture's rows, column after column. A folded group has the value that stands
 * for all of its layers: NaN before infinity before numbers before zero; of the numbers the largest
 * or, relative to a median, the one farthest from it.
 * @param {Float32Array} values of the field's rows, measured or relative
 */
export function valuesOfRows(values, field, rows, scale) {
  const result = new Float32Array(field.steps.length * rows.length);
  const rowsOf = ({ layers }) => [...new Set(layers.map((layer) => rowOf(field, layer)))].filter((row) => row >= 0);
  const behind = rows.map(rowsOf);
  for (let column = 0; column < field.steps.length; column++) {
    const start = column * field.rows;
    for (let index = 0; index < rows.length; index++) {
      const own = behind[index];
      let value = own.length ? values[start + own[0]] : -1;
      for (let i = 1; i < own.length; i++) {
        const other = values[start + own[i]];
        if (rankOf(other, scale) > rankOf(value, scale)) value = other;
      }
      result[column * rows.length + index] = value;
    }
  }
  return result;
}

function rankOf(value, { diverging, log }) {
  if (value !== value) return Infinity;
  if (value === Infinity) return Number.MAX_VALUE;
  if (!diverging || value < 0 || (log && value === 0)) return value;
  return 1 + Math.abs(log ? Math.log(value) : value - 1);
}

/** Where the last column ends: it is as wide as the one before. */
export function endOf(steps) {
  const count = steps.length;
  if (!count) return 1;
  return steps[count - 1] + (count > 1 ? steps[count - 1] - steps[count - 2] : 1);
}

/**
 * Medians over time of each row, or over the depth of each column; of finite values and, where
 * magnitudes count, those above zero. NaN without such values.
 */
function medians(field, mode, log) {
  const columns = field.steps.length;
  const own = mode === "own";
  const result = new Float32Array(own ? field.rows : columns);
  const buffer = new Float32Array(own ? columns : field.rows);
  for (let i = 0; i < result.length; i++) {
    let count = 0;
    for (let j = 0; j < buffer.length; j++) {
      const value = field.values[own ? j * field.rows + i : i * field.rows + j];
      if (value < Infinity && (log ? value > 0 : value >= 0)) buffer[count++] = value;
    }
    const sorted = buffer.subarray(0, count).sort();
    result[i] = count ? (sorted[(count - 1) >> 1] + sorted[count >> 1]) / 2 : NaN;
  }
  return result;
}

/**
 * Values relative to medians of the whole, of which a field may be a part: ratios where magnitudes
 * count, else 1 + difference.
 */
export function relativeValues(field, whole, mode, log) {
  const reference = medians(whole, mode, log);
  const result = new Float32Array(field.values.length);
  for (let column = 0; column < field.steps.length; column++) {
    const wholeColumn = Math.max(columnAt(whole.steps, field.steps[column]), 0);
    for (let row = 0; row < field.rows; row++) {
      const layer = field.firstLayer + row * field.layerFactor;
      const median = reference[mode === "own" ? Math.max(rowOf(whole, layer), 0) : wholeColumn];
      const index = column * field.rows + row;
      result[index] = relative(field.values[index], median, log);
    }
  }
  return result;
}

/**
 * Values relative to those of another run, at the step that holds there; infinite where that has 0,
 * NaN where one is NaN, −1 where one has none. The same layer has the same name in both.
 */
export function relativeToRun(field, layers, other, others, log) {
  const result = new Float32Array(field.values.length).fill(-1);
  const placeOf = new Map(others.map(({ name }, index) => [name, index]));
  const rows = Array.from({ length: field.rows }, (_, row) => {
    const { name } = layers[field.firstLayer + row * field.layerFactor];
    return placeOf.has(name) ? rowOf(other, placeOf.get(name)) : -1;
  });
  const end = endOf(other.steps);
  field.steps.forEach((step, column) => {
    const theirs = step < end ? columnAt(other.steps, step) : -1;
    if (theirs < 0) return;
    rows.forEach((row, index) => {
      const value = field.values[column * field.rows + index];
      const reference = row < 0 ? -1 : other.values[theirs * other.rows + row];
      if (value < 0 || reference < 0) return;
      const ratio = log ? value / reference : 1 + value - reference;
      result[column * field.rows + index] = value === reference ? 1 : ratio;
    });
  });
  return result;
}

const ROUNDING = 1e-3; // of a ratio of two float32

/** The first step at which values relative to another run are not 1. */
export function firstDifference(field, values) {
  const differs = (value) => value !== value || (value >= 0 && Math.abs(value - 1) > ROUNDING);
  return firstWhere(field, values, differs);
}

/** The first step at which values pass a test, and the rows of these values; or null. */
function firstWhere({ rows, steps }, values, test) {
  const index = values.findIndex(test);
  if (index < 0) return null;
  const column = Math.floor(index / rows);
  const own = values.subarray(column * rows, (column + 1) * rows);
  return { step: steps[column], rows: [...own.keys()].filter((row) => test(own[row])) };
}

/** The first step at which a value is NaN or infinite. */
export function firstNonfinite(field) {
  return firstWhere(field, field.values, (value) => !(value < Infinity));
}

/** The measured values of a row over time. */
export function curveAt(steps, values, rowCount, row) {
  const valueIn = (column) => (row < 0 ? -1 : values[column * rowCount + row]);
  const measured = [...steps.keys()].filter((column) => !(valueIn(column) < 0));
  return { steps: measured.map((column) => steps[column]), values: measured.map(valueIn) };
}

/** The steps that all curves have, and the values of the curves at each. */
export function aligned(curves) {
  const byStep = curves.map(({ steps, values }) => new Map(Array.from(steps, (step, i) => [step, values[i]])));
  const steps = [...byStep[0].keys()].filter((step) => byStep.every((known) => known.has(step)));
  return { steps, at: steps.map((step) => byStep.map((known) => known.get(step))) };
}

function relative(value, median, log) {
  if (value < 0 || !(value < Infinity)) return value;
  if (median !== median) return value === 0 ? 0 : -1;
  return log ? value / median : 1 + value - median;
}
