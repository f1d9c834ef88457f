// One run: its data, how its layers are grouped into rows, and the values that are drawn of them.

import { append, endOf, isThinned, measuredLayers, relativeToRun, relativeValues, valuesOfRows } from "./field.js";
import { rangesOf } from "./profile.js";
import { groupByPath, groupByRole, isUntrained, makeRows } from "./rows.js";
import { Latest, memo } from "./state.js";
import { firstNonfinite } from "./view.js";

const ZOOM_DELAY_MS = 200;

export class Run {
  /**
   * @param {Object} source where data comes from
   * @param {string} name
   * @param {() => void} changed called when more data of a zoomed view has come
   */
  constructor(source, name, changed) {
    this.source = source;
    this.name = name;
    this.round = 0; // how often new data has come
    this.fields = new Map();
    this.part = new Latest(changed);
    // The whole field gives the scale, its part in view the cells.
    this.ofWhole = memo(relative);
    this.ofPart = memo(relative);
    this.rowsOf = memo(makeRows);
    this.worthShowing = memo(worthShowing);
    this.firstNonfinite = memo(firstNonfinite);
    this.rowValues = memo(valuesOfRows);
    this.rangesOf = memo(rangesOf);
  }

  /** Loads a statistic, and the overview unless it is loaded. */
  async load(statistic) {
    if (this.overview) {
      if (!this.fields.has(statistic)) this.fields.set(statistic, await this.#read(statistic));
      return;
    }
    const [overview, scalars, field] = await Promise.all([
      this.source.overview(this.name),
      this.source.scalars(this.name),
      this.#read(statistic),
    ]);
    this.fields.set(statistic, field);
    this.#take(overview, scalars);
  }

  /** Reads new data; everything again where the old data is invalid. */
  async refresh(statistic) {
    const [overview, scalars] = await Promise.all([
      this.source.overview(this.name),
      this.source.scalars(this.name),
    ]);
    const field = this.fields.get(statistic);
    const isSame = overview.version === this.overview.version;
    if (!isSame || overview.lastStep !== this.overview.lastStep) {
      let fresh;
      if (isSame && field && !isThinned(field) && field.steps.length) {
        const newer = await this.#read(statistic, { first_step: field.steps[field.steps.length - 1] + 1 });
        if (!isThinned(newer) && newer.rows === field.rows) fresh = append(field, newer);
      }
      fresh ??= await this.#read(statistic);
      this.fields = new Map([[statistic, fresh]]); // not before: keys move in the current picture
    }
    this.#take(overview, scalars);
  }

  #read(statistic, part) {
    return this.source.matrix(this.name, statistic, part);
  }

  #take(overview, scalars) {
    if (overview.version !== this.overview?.version) {
      const { layers } = overview;
      this.groupings = { depth: groupByPath(layers), role: groupByRole(layers) };
      this.places = new Map(layers.map((layer, index) => [layer.name, index]));
    }
    this.overview = overview;
    this.scalars = scalars;
    this.round += 1;
    const placeOf = (alert) => this.places.get(alert.observed_in ?? alert.module_name) ?? null;
    this.alerts = overview.alerts.map((alert) => ({ ...alert, layer: placeOf(alert) }));
  }

  /** The place of a layer; −1 without it. */
  indexOf(name) {
    return this.places.get(name) ?? -1;
  }

  field(statistic) {
    return this.fields.get(statistic.name);
  }

  /** The steps of a statistic; while it loads, those of the one before. */
  steps(statistic) {
    return (this.field(statistic) ?? this.lastField)?.steps ?? [];
  }

  /** Steps from the first to the end of the last column; null without any. */
  extent(statistic) {
    const steps = this.steps(statistic);
    return steps.length ? [steps[0], endOf(steps)] : null;
  }

  /** @param {Object} state `folded`, `search`, `order`, and `all`: also layers without values */
  rows({ folded, search, order, all }, statistic) {
    const field = all ? null : this.field(statistic);
    const shown = field ? this.worthShowing(field, this.overview.layers, this.alerts) : null;
    return this.rowsOf(this.overview.layers, this.groupings[order], folded, search, shown);
  }

  /** Values to draw: those measured, or relative to medians or to another run. */
  values(field, statistic, mode, compared) {
    if (mode === "value") return field.values;
    const whole = this.field(statistic);
    const others = mode === "run" ? compared.overview.layers : null;
    const reference = mode === "run" ? compared.field(statistic) : whole;
    const of = field === whole ? this.ofWhole : this.ofPart;
    return of(field, reference, mode, statistic.log, this.overview.layers, others);
  }

  /** The field to draw in a view: of a reduced one, the full part once it is loaded. */
  fieldIn(view, statistic, isZoomed, rows) {
    const whole = (this.lastField = this.field(statistic));
    if (!isZoomed || !isThinned(whole) || whole.isAll) return whole;
    const query = partOf(view, rows);
    const key = [statistic.name, ...Object.values(query)].join(" ");
    const part = this.part.to(key, this.round, () => this.#read(statistic.name, query), ZOOM_DELAY_MS);
    return part && !part.error ? part : whole;
  }
}

function relative(field, reference, mode, log, layers, others) {
  if (mode === "run") return relativeToRun(field, layers, reference, others, log);
  return relativeValues(field, reference, mode, log);
}

/** Layers with a value or an alert, and those that do not train; null: all, if none has a value. */
function worthShowing(field, layers, alerts) {
  const shown = measuredLayers(field);
  if (!shown.size) return null;
  for (const { layer } of alerts) if (layer !== null) shown.add(layer);
  layers.forEach((layer, index) => isUntrained(layer) && shown.add(index));
  return shown;
}

/** Layers and steps behind a view. */
function partOf(view, rows) {
  const shown = rows.slice(Math.floor(view.row0), Math.ceil(view.row1)).flatMap(({ layers }) => layers);
  return {
    first_step: Math.max(0, Math.floor(view.step0)),
    last_step: Math.max(0, Math.ceil(view.step1)),
    first_layer: shown.length ? shown.reduce((a, b) => Math.min(a, b)) : 0,
    last_layer: shown.reduce((a, b) => Math.max(a, b), 0),
  };
}
