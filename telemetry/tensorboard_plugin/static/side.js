// The side panel: a chosen alert, the layers that changed first, a layer in detail, all alerts.

import { AlertList, alertText, layersOf } from "./alert_list.js";
import { Detail } from "./detail.js";
import { element, fill } from "./dom.js";
import { Extremes, layerItem } from "./extremes.js";
import { formatNumber, formatStep } from "./format.js";

export class Side {
  /** @param {import("./app.js").App} app */
  constructor(app) {
    this.app = app;
    const { actions } = app;
    this.chosen = element("section", { class: "chosen-alert", "aria-label": "Chosen alert" });
    this.onsets = new Onsets((layer, step) => actions.select(layer, step));
    const on = {
      close: () => actions.close(),
      layer: (layer) => actions.select(layer, app.state.step),
      move: (count) => actions.moveStep(count),
      statistic: (statistic) => app.change({ statistic }),
      alert: (alert) => {
        actions.chooseAlert(alert);
        app.focusedPanel().heatmap.node.focus(); // the button was removed
      },
      histogram: (histogram) => app.change({ histogram }),
      onsets: app.source.onsets ? () => actions.showOnsets() : null,
    };
    this.detail = new Detail(on, app.large);
    this.extremes = new Extremes((layer, step) => actions.select(layer, step));
    this.alertList = new AlertList((alert) => actions.chooseAlert(alert));
    this.hparams = element("details", { class: "hparams" });
    this.node = element(
      "aside",
      { class: "side", "aria-label": "Details and alerts" },
      element("button", { class: "drawer-close", onclick: () => actions.close() }, "Close"),
      this.chosen,
      this.onsets.node,
      this.detail.node,
      this.extremes.node,
      this.hparams,
      this.alertList.node,
    );
  }

  /** Scrolls to the chosen alert. */
  scrollToTop() {
    this.node.scrollTop = 0; // of the drawer
    window.scrollTo({ top: 0 });
  }

  draw() {
    const { app } = this;
    this.node.classList.toggle("open", app.isSideOpen);
    const alert = app.chosenAlert;
    const isOneOfTwo = app.panels.length > 1;
    const panel = app.detailPanel();
    const focused = panel ?? app.focusedPanel();
    const run = isOneOfTwo ? focused.run : null;
    fill(
      this.chosen,
      alert ? element("div", { class: `alert ${alert.severity}` }, ...alertText(alert, run)) : null,
    );
    this.onsets.show(focused.run, focused.overview.layers);
    this.extremes.show(focused, app.statistic, app.state.step ?? focused.overview.lastStep);
    this.#drawHparams();
    this.alertList.show(app.panels, alert);
    const layer = panel?.overview.layers.find((known) => known.name === app.state.layer);
    if (!layer) return this.detail.clear();
    this.detail.show({
      run: panel.run,
      runs: app.panels.map((known) => known.run),
      layer,
      layers: panel.overview.layers,
      step: app.state.step,
      statistic: app.statistic,
      statistics: panel.overview.statistics,
      view: app.view(),
      alerts: panel.alerts.filter((known) => known !== alert && layersOf(known).includes(layer.name)),
      histogram: app.state.histogram,
      hasSteps: panel.steps(app.statistic).length > 0,
      theme: app.theme,
    });
  }

  /** The hyperparameters of the runs, the values in which two differ in bold. */
  #drawHparams() {
    const all = this.app.panels.map(({ overview }) => overview.hparams ?? {});
    const names = [...new Set(all.flatMap(Object.keys))];
    this.hparams.hidden = !names.length;
    if (!this.app.source.isLive) this.hparams.open = true; // a report may be printed
    const text = (value) => (typeof value === "number" ? formatNumber(value) : String(value ?? "–"));
    const row = (name) => {
      const values = all.map((hparams) => text(hparams[name]));
      const cells = values.map((value) => element("td", { class: new Set(values).size > 1 ? "strong" : "" }, value));
      return element("tr", {}, element("th", { scope: "row" }, name), ...cells);
    };
    const [first] = all;
    const few = Object.keys(first).map((name) => `${name} ${text(first[name])}`).join(" · ");
    fill(
      this.hparams,
      element("summary", { title: few }, element("b", {}, "Hyperparameters"), element("span", { class: "muted" }, ` ${few}`)),
      element("table", {}, element("tbody", {}, ...names.map(row))),
    );
  }
}

const MOST = 8;

export class Onsets {
  /** @param {(layer: string, step: number) => void} onChoose */
  constructor(onChoose) {
    this.onChoose = onChoose;
    this.node = element("section", { class: "onsets", "aria-label": "Which layers changed first" });
    this.request = 0;
  }

  /** Whether it shows, or loads, the layers that changed first around a step of a run. */
  isOf(run, step) {
    return this.run === run && this.step === step;
  }

  /** Loads the layers that changed first around a step; answers to earlier requests are ignored. */
  async load(source, run, step) {
    const request = ++this.request;
    this.data = null;
    [this.run, this.step] = [run, step];
    const found = await source.onsets(run, step).catch((error) => ({ error: error.message }));
    if (request === this.request) this.data = { run, step, ...found };
  }

  clear() {
    this.request++;
    this.data = this.step = null;
  }

  /** Shows the loaded layers, if they are of this run. */
  show(run, layers) {
    const { data } = this;
    this.node.hidden = !data || data.run !== run || data.isUnknown;
    if (this.node.hidden) return;
    const known = new Set(layers.map((layer) => layer.name));
    const shown = data.onsets?.filter((onset) => known.has(onset.name)) ?? [];
    fill(
      this.node,
      element("h2", {}, "Which layers changed first", element("span", { class: "count" }, countText(data, shown))),
      element("p", { class: data.error ? "failure" : "muted" }, explanation(data, shown)),
      element("ol", {}, ...shown.slice(0, MOST).map((onset) => this.#item(onset))),
    );
  }

  #item(onset) {
    const text = `step ${formatStep(onset.step)} · ${factorText(onset.factor)}`;
    return layerItem(onset.name || "the model", text, () => this.onChoose(onset.name, onset.step));
  }
}

function countText(data, shown) {
  return shown.length ? `${data.count} of ${data.layers} layers` : "";
}

function explanation(data, shown) {
  if (data.error) return data.error;
  const step = formatStep(data.step);
  if (data.onsets === null) return `Too few steps before step ${step} to know the usual range.`;
  if (!shown.length) return `No layer's gradient norm was unusual at step ${step}.`;
  return `Gradient norms out of their usual range by step ${step}, the earliest first.`;
}

/** A ratio to the usual norm as text. */
function factorText(value) {
  const factor = Number(value); // JSON has no infinity
  if (factor === Infinity) return "NaN or infinite";
  if (factor === 0) return "fell to 0";
  return factor >= 1 ? `${formatNumber(factor)}x above` : `${formatNumber(1 / factor)}x below`;
}
