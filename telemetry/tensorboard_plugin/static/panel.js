// One run: its data, the strip with loss and learning rate, the picture, profile and curves.

import { element, fill } from "./dom.js";
import {
  append,
  endOf,
  firstDifference,
  isThinned,
  measuredLayers,
  relativeToRun,
  relativeValues,
  valuesOfRows,
} from "./field.js";
import { formatStep } from "./format.js";
import { withHair } from "./crosshair.js";
import { Heatmap, RIGHT } from "./heatmap.js";
import { COSTS_HEIGHT, drawCosts } from "./costs.js";
import { drawLayerCurves, drawStrip, STRIP_HEIGHT } from "./curves.js";
import { drawProfile, profileWidth } from "./profile.js";
import { groupByPath, groupByRole, isUntrained, makeRows, rowOfLayer, titleOf } from "./rows.js";
import { firstNonfinite } from "./view.js";

export class Panel {
  /**
   * @param {Object} source where data comes from
   * @param {string} run
   * @param {Object} on callbacks of the picture; `changed()` when data has arrived
   */
  constructor(source, run, on) {
    this.source = source;
    this.run = run;
    this.on = on;
    this.heatmap = new Heatmap(on);
    this.strip = element("canvas", {
      class: "strip",
      role: "img",
      "aria-label": "Loss and learning rate",
    });
    this.stripLegend = element("div", {});
    this.costs = element("canvas", { class: "costs", role: "img", "aria-label": "Time and memory" });
    this.costsLegend = element("div", {});
    this.title = element("h2", { class: "run-name" }, run);
    this.notice = element("p", { class: "notice", role: "status", hidden: true });
    this.first = element("div", { class: "first-nonfinite" });
    this.profile = element("canvas", { class: "profile", role: "img" });
    this.map = element("div", { class: "map-row" }, this.heatmap.node, this.profile);
    this.curvesTitle = element("h2", { class: "curves-title" });
    this.curves = element("canvas", { class: "curves", role: "img" });
    this.curvesLegend = element("div", {});
    this.node = element(
      "section",
      { class: "panel", "aria-label": run },
      this.title,
      this.stripLegend,
      withHair(this.strip),
      this.costsLegend,
      withHair(this.costs),
      this.notice,
      this.first,
      this.map,
      this.curvesTitle,
      withHair(this.curves),
      this.curvesLegend,
    );
    this.fields = new Map();
    this.part = new ZoomedPart(source, run, on);
    this.relative = new Map();
    this.firsts = new WeakMap();
  }

  /** Loads a statistic, and the overview unless it is loaded. */
  async load(statistic) {
    if (!this.overview) {
      const [overview, scalars] = await Promise.all([
        this.source.overview(this.run),
        this.source.scalars(this.run),
        this.#loadField(statistic),
      ]);
      this.#take(overview);
      this.scalars = scalars;
    } else if (!this.fields.has(statistic)) await this.#loadField(statistic);
  }

  /** Reads new data; everything again where the old data is invalid. */
  async refresh(statistic) {
    const [overview, scalars] = await Promise.all([
      this.source.overview(this.run),
      this.source.scalars(this.run),
    ]);
    const field = this.fields.get(statistic);
    const isSame = overview.version === this.overview?.version;
    const grew = overview.lastStep !== this.overview?.lastStep;
    if (!isSame || grew) {
      let fresh;
      if (isSame && field && !isThinned(field) && field.steps.length) {
        const last = field.steps[field.steps.length - 1];
        const newer = await this.source.matrix(this.run, statistic, { first_step: last + 1 });
        if (!isThinned(newer) && newer.rows === field.rows) fresh = append(field, newer);
      }
      fresh ??= await this.#read(statistic);
      this.part.forget();
      this.fields = new Map([[statistic, fresh]]); // not before: keys move in the current picture
    }
    this.#take(overview);
    this.scalars = scalars;
  }

  field(statistic) {
    return this.fields.get(statistic.name);
  }

  /** Values to draw: those measured, or relative to medians or to the panel of another run. */
  values(field, statistic, mode, compared) {
    if (mode === "value") return field.values;
    const key = `${statistic.name} ${mode}`;
    const known = this.relative.get(key);
    const whole = (mode === "run" ? compared : this).field(statistic);
    if (known?.field === field && known.whole === whole) return known.values;
    const values =
      mode === "run"
        ? relativeToRun(field, this.overview.layers, whole, compared.overview.layers, statistic.log)
        : relativeValues(field, whole, mode, statistic.log);
    this.relative.set(key, { field, whole, values });
    return values;
  }

  /** The values of each row in the picture. */
  rowValues(field, values, rows, scale) {
    const of = [values, rows, scale.diverging, scale.log];
    if (!this.drawn || of.some((part, i) => part !== this.drawn.of[i])) {
      this.drawn = { of, values: valuesOfRows(field, values, rows, scale) };
    }
    return this.drawn.values;
  }

  /** The steps of a statistic; while it loads, those of the current picture. */
  steps(statistic) {
    return (this.field(statistic) ?? this.heatmap.content?.field)?.steps ?? [];
  }

  /** Steps from the first to the end of the last column. */
  extent(statistic) {
    const steps = this.steps(statistic);
    return steps.length ? [steps[0], endOf(steps)] : null;
  }

  /** How layers are grouped in an order, `depth` or `role`. */
  grouping(order) {
    return this.groupings[order];
  }

  /** Where NaN or infinity came first in a statistic; null if it did not. */
  firstNonfinite(statistic) {
    const field = this.field(statistic);
    if (!this.firsts.has(field)) this.firsts.set(field, firstNonfinite(field));
    return this.firsts.get(field);
  }

  /** The row that shows a layer by its name; −1 without one. */
  rowNamed(rows, name) {
    return rowOfLayer(rows, this.overview.layers.findIndex((layer) => layer.name === name));
  }

  /** @param {Object} state `folded`, `search`, `order`, and `all`: also layers without values */
  rows({ folded, search, order, all }, statistic) {
    const field = all ? null : this.field(statistic);
    const key = `${order}|${[...folded].join(",")}|${search}`;
    const { known } = this;
    if (known?.key !== key || known.overview !== this.overview || known.field !== field) {
      const shown = field && this.#worthShowing(field);
      const rows = makeRows(this.overview.layers, this.grouping(order), folded, search, shown);
      this.known = { key, field, overview: this.overview, rows };
    }
    return this.known.rows;
  }

  /** Layers with a value or an alert, and those that do not train; all of them if none has. */
  #worthShowing(field) {
    const shown = measuredLayers(field);
    if (!shown.size) return null;
    for (const alert of this.alerts) if (alert.layer !== null) shown.add(alert.layer);
    this.overview.layers.forEach((layer, index) => isUntrained(layer) && shown.add(index));
    return shown;
  }

  /** The field to draw in a view: of a reduced one, the full part once it is loaded. */
  visibleField(statistic, view, isZoomed, rows) {
    const whole = this.field(statistic);
    if (!isZoomed || !isThinned(whole) || whole.isAll) return whole;
    return this.part.field(statistic.name, view, rows) ?? whole;
  }

  /** @param {Object} shown settings of the app: `statistic`, `view`, `scale`, `theme`, ... */
  draw(shown) {
    const { statistic, width, field } = shown;
    const rightOf = profileWidth(width);
    const legend = drawStrip(this.strip, this.scalars, this.overview.lastStep, shown, rightOf + RIGHT);
    this.strip.hidden = this.stripLegend.hidden = !legend;
    fill(this.stripLegend, legend);
    const costs = drawCosts(this.costs, this.scalars, shown, rightOf + RIGHT);
    this.costs.hidden = this.costsLegend.hidden = !costs;
    fill(this.costsLegend, costs);
    this.#drawNotice(field, shown);
    this.#drawFirst(shown);
    this.heatmap.draw({ ...shown, width: width - rightOf });
    this.drawProfile(shown);
    const isEmpty = !field.steps.length || !shown.rows.length;
    this.map.hidden = !this.overview.layers.length;
    this.curves.hidden = this.curvesTitle.hidden = this.curvesLegend.hidden = isEmpty;
    if (!isEmpty) {
      this.curvesTitle.textContent = `${statistic.title} over time`;
      this.curves.setAttribute("aria-label", this.curvesTitle.textContent);
      fill(this.curvesLegend, drawLayerCurves(this.curves, shown, rightOf + RIGHT));
    }
    Object.assign(this.node.dataset, {
      run: this.run,
      layers: this.overview.layers.length,
      steps: field.steps.length,
      lastStep: this.overview.lastStep,
    });
  }

  /**
   * Draws onto other canvases.
   * @param {() => Object} create makes one
   * @returns {{canvas: Object, height: number, legend?: string, offset?: number}[]} from top to
   *   bottom; a part without a height is next to or on top of the next one
   */
  drawOnto(create, shown) {
    const own = [this.strip, this.costs, this.heatmap.cells, this.heatmap.overlay, this.profile, this.curves];
    const other = own.map(create);
    const use = ([strip, costs, cells, overlay, profile, curves]) => {
      Object.assign(this, { strip, costs, profile, curves });
      Object.assign(this.heatmap, { cells, overlay });
    };
    use(other);
    try {
      this.draw(shown);
    } finally {
      use(own);
    }
    const [strip, costs, cells, overlay, profile, curves] = other;
    const legend = (node) => [...node.querySelectorAll("span")].map((s) => s.textContent).join("   ");
    const offset = shown.width - profileWidth(shown.width);
    const parts = [
      { canvas: strip, height: STRIP_HEIGHT, legend: legend(this.stripLegend) },
      { canvas: costs, height: COSTS_HEIGHT, legend: legend(this.costsLegend) },
      { canvas: cells, height: 0 },
      { canvas: profile, height: 0, offset },
      { canvas: overlay, height: shown.height },
      { canvas: curves, height: parseFloat(curves.style.height), legend: this.curvesTitle.textContent },
    ];
    return parts.filter(({ canvas }) => !canvas.hidden);
  }

  /** The profile at a step; without it at the selected one, in the middle, or at the end. */
  drawProfile(shown, step = null) {
    const width = profileWidth(shown.width);
    this.profile.hidden = !width;
    if (!width) return;
    const { step0, step1 } = shown.view;
    const middle = Math.floor((step0 + step1) / 2);
    const at = step ?? shown.cursor ?? (shown.isZoomed ? middle : this.overview.lastStep);
    drawProfile(this.profile, shown, width, at);
    const label = `${shown.statistic.title} over the depth at step ${at}`;
    this.profile.setAttribute("aria-label", label);
  }

  /** The line with the first NaN or difference; a click goes there. */
  #drawFirst({ statistic, mode, field, values }) {
    const isOfTwo = mode === "run";
    const found = isOfTwo ? firstDifference(field, values) : this.firstNonfinite(statistic);
    this.first.hidden = !found;
    if (!found) return fill(this.first);
    const { firstLayer, layerFactor } = isOfTwo ? field : this.field(statistic);
    const names = found.rows.map((row) => this.overview.layers[firstLayer + row * layerFactor]);
    const more = names.length > 1 ? ` and ${names.length - 1} more` : "";
    const at = `step ${formatStep(found.step)}, in `;
    const text =
      isOfTwo || !more
        ? `First ${isOfTwo ? "difference" : "NaN or infinity"}: ${at}${titleOf(names[0])}${more}`
        : `First NaN or infinity: ${at}${names.length} layers${originText(this.alerts)}`;
    const onclick = () => this.on.step(found.step);
    fill(this.first, element("button", { dataset: { key: "first" }, title: text, onclick }, text));
  }

  #take(overview) {
    if (overview.version !== this.overview?.version) {
      const { layers } = overview;
      this.groupings = { depth: groupByPath(layers), role: groupByRole(layers) };
    }
    const layerOf = new Map(overview.layers.map((layer, index) => [layer.name, index]));
    this.overview = overview;
    this.alerts = overview.alerts.map((alert) => ({
      ...alert,
      layer: layerOf.get(alert.observed_in ?? alert.module_name) ?? null,
    }));
  }

  async #loadField(statistic) {
    this.fields.set(statistic, await this.#read(statistic));
  }

  #read(statistic) {
    return this.source.matrix(this.run, statistic);
  }

  #drawNotice(field, { statistic, rows, search, mode, values }) {
    const isFound = rows.length || !search;
    const hasNothingCommon = mode === "run" && field.steps.length && values.every((value) => value === -1);
    const text = hasNothingCommon
      ? "No layer has this statistic at a common step in both runs: there is no ratio to show."
      : isFound ? noticeOf(field, statistic, this.overview) : `No layer matches “${search}”.`;
    this.notice.hidden = !text;
    if (this.notice.textContent !== text) this.notice.textContent = text;
  }
}

/** The layer in which NaN began, by the alert about it: within a step, NaN spreads forwards and backwards. */
function originText(alerts) {
  const faults = alerts.flatMap((alert) => [alert, ...alert.consequences]);
  const named = faults.find(({ kind, module_name: layer }) => kind === "nonfinite" && layer);
  return named ? `; alert: ${named.module_name}` : "";
}

/** A notice about layers that do not train and about omitted cells; "" without any. */
function noticeOf(field, statistic, { layers, trainedShare }) {
  if (!layers.length) return "This run has no layers: only scalars were logged.";
  if (!field.steps.length) return `${statistic.title}: not measured yet.`;
  const parts = [];
  if (field.layerFactor > 1) parts.push(`${field.layerFactor} layers`);
  if (field.stepFactor > 1) parts.push(`${field.stepFactor} steps`);
  const notices = [];
  if (trainedShare !== null && trainedShare < 1)
    notices.push(`${(100 * trainedShare).toFixed(1)} % of the parameters are in layers that train.`);
  const isWhole = !parts.length && !field.sampled;
  if (parts.length) notices.push(`Reduced: each cell is the largest of ${parts.join(" × ")}.`);
  if (field.sampled) notices.push("Too much to read at once: some steps are omitted.");
  if (!isWhole && !field.isAll) notices.push("Zoom in to see all.");
  if (!field.values.some((value) => value >= 0 || value !== value))
    notices.push(`${statistic.title}: not measured for any layer of this run.`);
  return notices.join(" ");
}

const DELAY_MS = 200;

export class ZoomedPart {
  /**
   * @param {Object} source where data comes from
   * @param {string} run
   * @param {Object} on `changed()` when data has come, `failed(error)`
   */
  constructor(source, run, on) {
    this.source = source;
    this.run = run;
    this.on = on;
    this.forget();
  }

  /** Discards the loaded part. */
  forget() {
    this.key = null;
    this.loaded = null;
  }

  /** The part in a view, in full; null while it loads. */
  field(statistic, view, rows) {
    const wanted = partOf(view, rows, statistic);
    if (this.key !== wanted.key) this.#load(statistic, wanted);
    return this.loaded;
  }

  #load(statistic, { key, query }) {
    this.key = key;
    this.loaded = null;
    clearTimeout(this.timer);
    this.timer = setTimeout(async () => {
      try {
        const field = await this.source.matrix(this.run, statistic, query);
        if (this.key === key) this.loaded = field;
        this.on.changed();
      } catch (error) {
        this.on.failed(error);
      }
    }, DELAY_MS);
  }
}

/** Layers and steps behind a view. */
function partOf(view, rows, statistic) {
  const shown = rows.slice(Math.floor(view.row0), Math.ceil(view.row1)).flatMap((r) => r.layers);
  const query = {
    first_step: Math.max(0, Math.floor(view.step0)),
    last_step: Math.max(0, Math.ceil(view.step1)),
    first_layer: shown.reduce((a, b) => Math.min(a, b), Infinity),
    last_layer: shown.reduce((a, b) => Math.max(a, b), 0),
  };
  if (!Number.isFinite(query.first_layer)) query.first_layer = 0;
  return { query, key: `${statistic} ${Object.values(query).join(" ")}` };
}
