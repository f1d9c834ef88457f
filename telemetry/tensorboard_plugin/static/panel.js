// One run: its data, the strip with loss and learning rate, and the picture.

import { drawChart, legendOf } from "./chart.js";
import { element, fill } from "./dom.js";
import { append, columnAt, endOf, isThinned, measuredLayers, relativeValues } from "./field.js";
import { formatNumber } from "./format.js";
import { Heatmap, RIGHT } from "./heatmap.js";
import { groupsOf, makeRows } from "./rows.js";

const STRIP_HEIGHT = 64;
const PART_DELAY_MS = 200;

export class Panel {
  /**
   * @param {Object} source where data comes from
   * @param {string} run
   * @param {Object} on what the picture reports; `changed()` when data has come
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
    this.title = element("h2", { class: "run-name" }, run);
    this.notice = element("p", { class: "notice", hidden: true });
    this.node = element(
      "section",
      { class: "panel", "aria-label": run },
      this.title,
      this.stripLegend,
      this.strip,
      this.notice,
      this.heatmap.node,
    );
    this.fields = new Map();
    this.part = null; // of a thinned field, in full for the zoomed view
    this.relative = new Map();
  }

  /** Loads a statistic, and what all of them share unless it is there already. */
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

  /** Reads what is new; all of it again where the old no longer counts. */
  async refresh(statistic) {
    const [overview, scalars] = await Promise.all([
      this.source.overview(this.run),
      this.source.scalars(this.run),
    ]);
    const field = this.fields.get(statistic);
    const isSame = overview.version === this.overview?.version;
    const grew = overview.lastStep !== this.overview?.lastStep;
    if (!isSame || grew) {
      this.part = null;
      this.fields.clear();
      if (isSame && field && !isThinned(field) && field.steps.length) {
        const last = field.steps[field.steps.length - 1];
        const newer = await this.source.matrix(this.run, statistic, { first_step: last + 1 });
        const fits = !isThinned(newer) && newer.rows === field.rows;
        this.fields.set(statistic, fits ? append(field, newer) : await this.#read(statistic));
      } else await this.#loadField(statistic);
    }
    this.#take(overview);
    this.scalars = scalars;
  }

  field(statistic) {
    return this.fields.get(statistic.name);
  }

  /** Values to draw: those measured, or relative to medians. */
  values(field, statistic, mode) {
    if (mode === "value") return field.values;
    const key = `${statistic.name} ${mode}`;
    const known = this.relative.get(key);
    if (known?.field === field) return known.values;
    const whole = this.fields.get(statistic.name);
    const values = relativeValues(field, whole, mode, statistic.log);
    this.relative.set(key, { field, values });
    return values;
  }

  /** Steps from the first to the end of the last column. */
  extent(statistic) {
    const field = this.field(statistic);
    if (!field?.steps.length) return null;
    return [field.steps[0], endOf(field.steps)];
  }

  /** @param {Object} state `folded`, `search`, and `all`: also layers without the statistic */
  rows({ folded, search, all }, statistic) {
    const field = all ? null : this.field(statistic);
    const key = `${[...folded].join(",")}|${search}`;
    const { known } = this;
    if (known?.key !== key || known.overview !== this.overview || known.field !== field) {
      const shown = field && this.#worthShowing(field);
      const rows = makeRows(this.overview.layers, this.groups, folded, search, shown);
      this.known = { key, field, overview: this.overview, rows };
    }
    return this.known.rows;
  }

  /** Layers with a value or an alert; all of them if none has. */
  #worthShowing(field) {
    const shown = measuredLayers(field);
    if (!shown.size) return null;
    for (const alert of this.alerts) if (alert.layer !== null) shown.add(alert.layer);
    return shown;
  }

  /** The field to draw in a view: of a thinned one the part in full, as soon as it has come. */
  visibleField(statistic, view, isZoomed, rows) {
    const whole = this.field(statistic);
    if (!isZoomed || !isThinned(whole) || whole.isAll) return whole;
    const wanted = partOf(view, rows, statistic.name);
    if (this.part?.key === wanted.key) return this.part.field ?? whole;
    this.#loadPart(statistic.name, wanted);
    return whole;
  }

  /** @param {Object} shown what the app has settled: `statistic`, `view`, `scale`, `theme`, ... */
  draw(shown) {
    const { statistic, view, theme, width, gutter } = shown;
    const field = shown.field;
    this.#drawStrip(view, theme, width, gutter, shown.selection?.step ?? null);
    this.#drawNotice(field, statistic);
    this.heatmap.draw({
      ...shown,
      layers: this.overview.layers,
      groups: this.groups,
      alerts: this.alerts,
    });
    Object.assign(this.node.dataset, {
      run: this.run,
      layers: this.overview.layers.length,
      steps: field.steps.length,
      lastStep: this.overview.lastStep,
    });
  }

  #take(overview) {
    if (overview.version !== this.overview?.version) this.groups = groupsOf(overview.layers);
    const layerOf = new Map(overview.layers.map((layer, index) => [layer.name, index]));
    this.overview = overview;
    this.alerts = overview.alerts.map((alert) => ({
      ...alert,
      layer: layerOf.get(alert.module_name) ?? null,
    }));
  }

  async #loadField(statistic) {
    this.fields.set(statistic, await this.#read(statistic));
  }

  #read(statistic) {
    return this.source.matrix(this.run, statistic);
  }

  #loadPart(statistic, wanted) {
    this.part = { key: wanted.key, field: null };
    clearTimeout(this.partTimer);
    this.partTimer = setTimeout(async () => {
      try {
        const field = await this.source.matrix(this.run, statistic, wanted.query);
        if (this.part?.key === wanted.key) this.part.field = field;
        this.on.changed();
      } catch (error) {
        this.on.failed(error);
      }
    }, PART_DELAY_MS);
  }

  #drawStrip(view, theme, width, gutter, cursor) {
    const curves = this.scalars.map((curve, i) => ({
      ...curve,
      color: theme.curves[i % theme.curves.length],
      label: curve.tag,
      isStepped: curve.kind === "learning rate",
    }));
    const isEmpty = !curves.length;
    this.strip.hidden = this.stripLegend.hidden = isEmpty;
    if (isEmpty) return;
    fill(this.stripLegend, legendOf(curves.map((curve) => withValue(curve, cursor))));
    const loss = curves.filter((curve) => curve.kind === "loss");
    const rates = curves.filter((curve) => curve.kind !== "loss");
    const options = {
      view,
      theme,
      width,
      height: STRIP_HEIGHT,
      left: gutter,
      right: RIGHT,
      cursor,
    };
    const log = isLog(loss[0]?.values ?? rates[0].values);
    drawChart(this.strip, {
      ...options,
      curves: loss.length ? loss : rates,
      log,
      second: loss.length ? rates : [],
    });
  }

  #drawNotice(field, statistic) {
    const text = noticeOf(field, statistic);
    this.notice.hidden = !text;
    this.notice.textContent = text;
  }
}

/** A curve whose label has its value at a step, or its last value. */
function withValue(curve, step) {
  const index = Math.max(columnAt(curve.steps, step ?? Infinity), 0);
  return { ...curve, label: `${curve.label} ${formatNumber(curve.values[index])}` };
}

/** A notice about what the picture leaves out; "" if it shows everything. */
function noticeOf(field, statistic) {
  if (!field.steps.length) return `${statistic.title}: not measured so far.`;
  const parts = [];
  if (field.layerFactor > 1) parts.push(`${field.layerFactor} layers`);
  if (field.stepFactor > 1) parts.push(`${field.stepFactor} steps`);
  const notices = [];
  if (parts.length) notices.push(`Thinned out: each cell is the largest of ${parts.join(" × ")}.`);
  if (field.sampled) notices.push("Too much to read at once: some steps are left out.");
  if (notices.length) return [...notices, field.isAll ? "" : "Zoom in to see all."].join(" ");
  return field.values.some((value) => value >= 0 || value !== value)
    ? ""
    : `${statistic.title}: not measured for any layer of this run.`;
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

/** Whether values span so much that a linear axis would hide most of them. */
function isLog(values) {
  let [low, high] = [Infinity, 0];
  for (const value of values) {
    if (!(value > 0) || value === Infinity) continue;
    low = Math.min(low, value);
    high = Math.max(high, value);
  }
  return high > 50 * low;
}
