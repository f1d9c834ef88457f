// One run: its data, how its layers are grouped into rows, and the values that are drawn of them.

import { append, firstNonfinite, isThinned, measuredLayers, relativeToRun, relativeValues } from "./field.js";
import { groupByPath, groupByRole, isUntrained, makeRows } from "./rows.js";
import { memo } from "./state.js";

const ZOOM_DELAY_MS = 200;

const rowsOf = memo(makeRows);
const firstNonfiniteOf = memo(firstNonfinite);

const relative = memo((field, reference, mode, log, layers, others) =>
  mode === "run" ? relativeToRun(field, layers, reference, others, log) : relativeValues(field, reference, mode, log),
);

/** Layers with a value or an alert, and those that do not train; null: all, if none has a value. */
const worthShowing = memo((field, layers, alerts) => {
  const shown = measuredLayers(field);
  if (!shown.size) return null;
  for (const { layer } of alerts) if (layer !== null) shown.add(layer);
  layers.forEach((layer, index) => isUntrained(layer) && shown.add(index));
  return shown;
});

export class Run {
  /**
   * @param {Object} source where data comes from
   * @param {string} name
   * @param {() => void} changed called when more data of a zoomed view has come
   */
  constructor(source, name, changed) {
    Object.assign(this, { source, name, changed });
    this.round = 0; // how often new data has come
    this.fields = new Map();
    this.part = {}; // what a zoomed view asked for: its `key`, and once it is there the `field` or the `error`
  }

  /** Loads a statistic, and the overview unless it is loaded. */
  async load(statistic) {
    const { fields } = this; // a refresh has others
    const [field, ...rest] = await Promise.all([
      fields.get(statistic) ?? this.#read(statistic),
      ...(this.overview ? [] : this.#readRest()),
    ]);
    fields.set(statistic, field);
    if (rest.length) this.#take(...rest);
  }

  /** Reads new data; everything again where the old data is invalid. */
  async refresh(statistic) {
    const [overview, scalars] = await Promise.all(this.#readRest());
    const field = this.fields.get(statistic);
    const isSame = overview.version === this.overview.version;
    if (!isSame || overview.lastStep !== this.overview.lastStep) {
      let fresh;
      if (isSame && field?.steps.length && !isThinned(field)) {
        const newer = await this.#read(statistic, { first_step: field.steps.at(-1) + 1 });
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

  #readRest() {
    return [this.source.overview(this.name), this.source.scalars(this.name)];
  }

  #take(overview, scalars) {
    if (overview.version !== this.overview?.version) {
      const { layers } = overview;
      this.groupings = { depth: groupByPath(layers), role: groupByRole(layers) };
      this.places = new Map(layers.map((layer, index) => [layer.name, index]));
    }
    Object.assign(this, { overview, scalars });
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

  firstNonfinite(statistic) {
    return firstNonfiniteOf(this.field(statistic));
  }

  /** @param {Object} state `folded`, `search`, `order`, and `all`: also layers without values */
  rows({ folded, search, order, all }, statistic) {
    const { layers } = this.overview;
    const field = all ? null : this.field(statistic);
    return rowsOf(layers, this.groupings[order], folded, search, field && worthShowing(field, layers, this.alerts));
  }

  /** Values to draw: those measured, or relative to medians or to another run. */
  values(field, statistic, mode, compared) {
    if (mode === "value") return field.values;
    const isOfRun = mode === "run";
    const reference = isOfRun ? compared.field(statistic) : this.field(statistic);
    return relative(field, reference, mode, statistic.log, this.overview.layers, isOfRun && compared.overview.layers);
  }

  /** The field to draw in a view: of a reduced one, the full part once it is loaded. */
  fieldIn(view, statistic, isZoomed, rows) {
    const whole = (this.lastField = this.field(statistic));
    if (!isZoomed || !isThinned(whole) || !this.source.isLive) return whole;
    const query = partOf(view, rows);
    const key = [this.round, statistic.name, ...Object.values(query)].join(" ");
    if (key !== this.part.key) this.#readPart({ key }, statistic, query);
    return this.part.field ?? whole;
  }

  #readPart(part, statistic, query) {
    clearTimeout(this.part.timer);
    this.part = part;
    part.timer = setTimeout(async () => {
      Object.assign(part, await this.#read(statistic.name, query).then((field) => ({ field }), (error) => ({ error })));
      if (part === this.part) this.changed();
    }, ZOOM_DELAY_MS);
  }
}

function partOf(view, rows) {
  const shown = rows.slice(Math.floor(view.row0), Math.ceil(view.row1)).flatMap(({ layers }) => layers);
  return {
    first_step: Math.max(0, Math.floor(view.step0)),
    last_step: Math.max(0, Math.ceil(view.step1)),
    first_layer: shown.length ? shown.reduce((a, b) => Math.min(a, b)) : 0,
    last_layer: shown.reduce((a, b) => Math.max(a, b), 0),
  };
}
