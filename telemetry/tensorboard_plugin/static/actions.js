// User actions on the picture: move, select, zoom, fold, follow alerts.

import { columnAt } from "./field.js";
import { innermostOpen, rowOfLayer } from "./rows.js";
import { aroundStep, limit, panView, reveal, scaleView } from "./view.js";

export class Actions {
  /** @param {import("./app.js").App} app */
  constructor(app) {
    this.app = app;
  }

  /** What the picture of a run reports. */
  ofPanel(run) {
    const { app } = this;
    const panel = () => app.panels.find((known) => known.run === run);
    return {
      select: (layer, step) => {
        app.state.ofOther = run === app.state.other;
        app.chosenAlert = null;
        app.side.onsets.clear();
        this.select(
          panel().overview.layers[layer].name,
          step ?? app.state.step ?? panel().overview.lastStep,
        );
      },
      hover: (cell, x, y, group) => app.hover(panel(), cell, x, y, group),
      zoom: (view) => this.zoomTo(view),
      scale: (factor, x, y) => this.zoomTo(scaleView(app.view(), factor, x, y)),
      pan: (dx, dy) => this.zoomTo(panView(app.view(), dx, dy, app.whole())),
      unzoom: () => this.unzoom(),
      fold: (path) => this.toggleFold(path),
      step: (step) => this.goTo(step),
      changed: () => app.draw(),
      failed: (error) => app.fail(error),
    };
  }

  /** What the keys do; in the picture of a run, with that run. */
  ofKeys() {
    const { app } = this;
    const here = () => {
      const panel = app.panels.find(({ node }) => node.contains(document.activeElement));
      if (panel) app.state.ofOther = panel.run === app.state.other;
      return this;
    };
    return {
      moveStep: (count) => here().moveStep(count),
      moveLayer: (count) => here().moveLayer(count),
      zoom: (factor) => this.zoomAtSelection(factor),
      unzoom: () => this.unzoom(),
      close: () => (app.isSideOpen ? this.close() : this.unzoom()),
      alert: (direction) => this.moveAlert(direction),
      fold: () => here().foldSelection(),
      search: () => app.toolbar.querySelector("input[type=search]").focus(),
      runs: () => this.chooseRun("run"),
      onsets: () => here().showOnsets(),
    };
  }

  /** Lists the runs to choose `run` or `other`, the one to compare with. */
  chooseRun(which, filter = this.app.state.filter) {
    const { app } = this;
    if (app.runs.length < 2) return;
    Object.assign(app.state, { table: which, filter });
    app.saveLink();
    const about = { layer: app.state.layer, statistic: app.statistic, theme: app.theme };
    app.runTable.open(app.runs, app.state[which], which, about, (name) => {
      // The table is read when it opens, and may have a run that has begun since.
      if (!app.runs.some((run) => run.name === name)) app.runs = [{ name }, ...app.runs];
      if (which === "run") app.change({ run: name, zoom: null, layer: null, step: null });
      else app.change({ other: name, zoom: null });
    });
  }

  /** A click on curves, a profile or a histogram: enlarges it, or goes to the nearest curve or row. */
  clickPlot({ step, layer, lines }, canvas) {
    const { app } = this;
    if (canvas.plotted.click) return canvas.plotted.click();
    const nearest = layer ?? lines.find((known) => known.isNearest)?.layer;
    if (nearest === undefined) return app.change({ step });
    const panel = app.panels.find((known) => known.node.contains(canvas)) ?? app.panels[0];
    this.ofPanel(panel.run).select(nearest, step);
  }

  /** Lists the layers that changed first around the selected step. */
  showOnsets() {
    const { app } = this;
    const panel = this.#panel();
    app.openSide();
    app.loadOnsets(panel.run, app.state.step ?? panel.overview.lastStep);
  }

  zoomTo(view) {
    this.app.change({ zoom: limit(view, this.app.whole()) });
  }

  unzoom() {
    this.app.change({ zoom: null, everything: true });
  }

  /** Closes the details. */
  close() {
    this.app.chosenAlert = null;
    this.app.isSideOpen = false;
    this.app.side.onsets.clear();
    this.select(null, null);
    this.app.panels[0]?.heatmap.node.focus();
  }

  /** @param {Object|null} alert that led there */
  select(layer, step, alert = null) {
    const { app } = this;
    let { zoom } = app.state;
    if (zoom && layer !== null)
      zoom = limit(reveal(app.view(), step, this.#rowIndex(layer), app.whole()), app.whole());
    if (layer !== null) app.isSideOpen = true;
    app.change({ layer, step, zoom });
    app.announcer.selection(alert);
    const run = app.detailPanel()?.run;
    if (run !== undefined && !app.side.detail.isOf(run, layer)) app.loadDetailSoon();
  }

  #panel() {
    return this.app.detailPanel() ?? this.app.focusedPanel();
  }

  #rowIndex(name) {
    const panel = this.#panel();
    const index = panel.overview.layers.findIndex((layer) => layer.name === name);
    return rowOfLayer(this.app.rows(panel), index);
  }

  moveStep(count) {
    const panel = this.#panel();
    const steps = panel.steps(this.app.statistic);
    const rows = this.app.rows(panel);
    if (!steps.length || !rows.length) return;
    const { layer, step } = this.app.state;
    const column = step === null ? steps.length - 1 : Math.max(columnAt(steps, step), 0) + count;
    const clamped = Math.min(Math.max(column, 0), steps.length - 1);
    this.select(layer ?? panel.overview.layers[rows[0].layers[0]].name, steps[clamped]);
  }

  moveLayer(count) {
    const panel = this.#panel();
    const rows = this.app.rows(panel);
    if (!rows.length) return;
    const { layer, step } = this.app.state;
    const current = layer === null ? (count > 0 ? -1 : 0) : this.#rowIndex(layer);
    const row = Math.min(Math.max(current + count, 0), rows.length - 1);
    this.select(
      panel.overview.layers[rows[row].layers[0]].name,
      step ?? panel.overview.lastStep,
    );
  }

  /** Opens the layer of the only row. */
  selectOnlyRow() {
    const [row, ...more] = this.app.rows(this.#panel());
    if (row && !more.length) this.ofPanel(this.#panel().run).select(row.layers[0], null);
  }

  moveAlert(direction) {
    const { app } = this;
    const alerts = app.panels.flatMap((panel) => panel.alerts).sort((a, b) => a.step - b.step);
    if (!alerts.length) return;
    const at = alerts.indexOf(app.chosenAlert);
    const next = at < 0 ? (direction > 0 ? 0 : alerts.length - 1) : at + direction;
    this.chooseAlert(alerts[(next + alerts.length) % alerts.length]);
  }

  /** Goes to an alert: its layer is selected; its statistic and the steps around it are shown. */
  chooseAlert(alert) {
    const { app } = this;
    const panel = app.panels.find((known) => known.alerts.includes(alert)) ?? app.panels[0];
    app.state.ofOther = panel.run === app.state.other;
    app.chosenAlert = alert;
    const layer = panel.overview.layers[alert.layer];
    const isKnown = panel.overview.statistics.some(({ name }) => name === alert.statistic);
    app.change({ zoom: null, ...(isKnown ? { statistic: alert.statistic } : {}) });
    if (layer && this.#rowIndex(layer.name) < 0) {
      app.change({ search: "", folded: new Set(), all: true });
    }
    this.zoomTo(aroundStep(alert.step, app.whole(), panel.steps(app.statistic)));
    app.isSideOpen = true;
    this.select(layer ? layer.name : app.state.layer, alert.step, alert);
    app.side.scrollToTop();
    app.loadOnsets(panel.run, alert.step);
  }

  /** Shows the steps around one. */
  goTo(step) {
    const { app } = this;
    this.zoomTo(aroundStep(step, app.whole(), this.#panel().steps(app.statistic)));
    app.change({ step });
  }

  zoomAtSelection(factor) {
    const { app } = this;
    const view = app.view();
    const { layer, step } = app.state;
    const x = step === null ? 0.5 : (step - view.step0) / (view.step1 - view.step0);
    const row = layer === null ? -1 : this.#rowIndex(layer);
    const y = row < 0 ? 0.5 : (row + 0.5 - view.row0) / (view.row1 - view.row0);
    this.zoomTo(scaleView(view, factor, x, y));
  }

  toggleFold(path) {
    const folded = new Set(this.app.state.folded);
    if (!folded.delete(path)) folded.add(path);
    this.app.change({ folded, zoom: null });
  }

  foldSelection() {
    const { app } = this;
    const panel = app.detailPanel();
    const index = panel?.overview.layers.findIndex((known) => known.name === app.state.layer);
    if (!panel || index < 0) return;
    const row = app.rows(panel)[this.#rowIndex(app.state.layer)];
    const path =
      row?.folded ?? innermostOpen(index, panel.grouping(app.state.order), app.state.folded);
    if (path) this.toggleFold(path);
  }
}
