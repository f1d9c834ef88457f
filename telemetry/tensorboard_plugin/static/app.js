// The page: holds its state, loads data and draws.

import { AlertList } from "./alert_list.js";
import { Detail } from "./detail.js";
import { element, fill } from "./dom.js";
import { columnAt, valueAt } from "./field.js";
import { formatValue } from "./format.js";
import { KEY_HELP, watchKeys } from "./keyboard.js";
import { drawLegend } from "./legend.js";
import { Panel } from "./panel.js";
import { fromLink, toLink } from "./permalink.js";
import { deepest, groupsAtDepth, innermostOpen, titleOf } from "./rows.js";
import { makeScale } from "./scale.js";
import { NewerFormatError } from "./source.js";
import { emptyMessage, failureMessage, loadingMessage, newerFormatMessage } from "./states.js";
import { theme as readTheme } from "./theme.js";
import { drawToolbar } from "./toolbar.js";
import { Tooltip } from "./tooltip.js";
import { clampRows, limit, panView, reveal, scaleView, wholeView } from "./view.js";

const DETAIL_DELAY_MS = 120;

export class App {
  /**
   * @param {HTMLElement} root
   * @param {Object} source where data comes from
   * @param {{read: () => Object, write: (link: Object) => void}} address
   */
  constructor(root, source, address) {
    this.root = root;
    this.source = source;
    this.address = address;
    this.state = fromLink(address.read());
    this.panels = [];
    this.theme = null;
    this.#build();
  }

  /** Loads and draws. A failure becomes a message with a button to try again. */
  async start() {
    this.#message(loadingMessage());
    try {
      this.runs = await this.source.runs();
      if (!this.runs.length) return this.#message(emptyMessage());
      this.#chooseRuns();
      await this.#load();
    } catch (error) {
      this.#fail(error);
    }
  }

  /** After TensorBoard has reloaded: reads what is new, keeps what is shown. */
  async refresh() {
    if (this.refreshing) return;
    this.refreshing = true;
    try {
      this.runs = await this.source.runs();
      const isGone = !this.runs.some((run) => run.name === this.state.run);
      if (!this.panels.length || isGone) return await this.start();
      await Promise.all(this.panels.map((panel) => panel.refresh(this.state.statistic)));
      this.#ready();
      if (this.state.layer !== null) this.#loadDetail();
    } catch (error) {
      this.#fail(error);
    } finally {
      this.refreshing = false;
    }
  }

  setTheme(theme) {
    this.theme = theme;
    this.draw();
  }

  #build() {
    this.toolbar = element("header", { class: "toolbar" });
    this.stage = element("main", { class: "stage" });
    this.legend = element("div", { class: "legend" });
    this.tooltip = new Tooltip();
    this.announcer = element("p", { class: "announcer", "aria-live": "polite" });
    this.alertList = new AlertList((alert) => this.#chooseAlert(alert));
    this.detail = new Detail({
      close: () => this.#select(null, null),
      move: (count) => this.#moveStep(count),
      statistic: (statistic) => this.change({ statistic }),
    });
    this.side = element("aside", { class: "side" }, this.detail.node, this.alertList.node);
    this.messageArea = element("div", { class: "message-area" });
    this.body = element(
      "div",
      { class: "body" },
      element(
        "div",
        { class: "center" },
        this.stage,
        this.legend,
        element("p", { class: "muted keys" }, KEY_HELP),
      ),
      this.side,
    );
    fill(this.root, this.toolbar, this.messageArea, this.body, this.tooltip.node, this.announcer);
    new ResizeObserver(() => this.draw()).observe(this.stage);
    window.addEventListener("beforeprint", () => this.#drawNow());
  }

  #chooseRuns() {
    const known = new Set(this.runs.map((run) => run.name));
    if (!known.has(this.state.run)) this.state.run = this.runs[this.runs.length - 1].name;
    if (!known.has(this.state.other) || this.state.other === this.state.run) this.state.other = "";
  }

  async #load() {
    const { run, other, statistic } = this.state;
    const names = other ? [run, other] : [run];
    const kept = new Map(this.panels.map((panel) => [panel.run, panel]));
    const panels = names.map(
      (name) => kept.get(name) ?? new Panel(this.source, name, this.#panelEvents(name)),
    );
    const request = (this.request = Symbol("request"));
    document.documentElement.dataset.ready = "false";
    if (panels.some((panel) => !panel.overview)) this.#message(loadingMessage());
    try {
      await Promise.all(panels.map((panel) => panel.load(statistic)));
    } catch (error) {
      if (request === this.request) throw error;
      return;
    }
    if (request !== this.request) return; // something else has been chosen meanwhile
    for (const panel of panels)
      if (!kept.has(panel.run)) watchKeys(panel.heatmap.node, this.#keys());
    this.panels = panels;
    const { statistics } = panels[0].overview;
    if (!statistics.some((known) => known.name === statistic)) {
      return this.change({ statistic: statistics[0].name });
    }
    fill(this.stage, ...panels.map((panel) => panel.node));
    this.stage.classList.toggle("two", panels.length > 1);
    this.#ready();
    if (this.state.layer !== null) this.#loadDetail();
  }

  #ready() {
    fill(this.messageArea);
    this.body.hidden = false;
    this.#drawNow();
    document.documentElement.dataset.ready = "true";
  }

  /** Takes over changes of the state, loads what they need, draws, and renews the link. */
  change(changes) {
    const { foldDepth, ...direct } = changes;
    if (foldDepth !== undefined) {
      const paths = foldDepth ? groupsAtDepth(this.panels[0].groups, foldDepth) : [];
      Object.assign(direct, { folded: new Set(paths), zoom: null });
    }
    Object.assign(this.state, direct);
    this.address.write(toLink(this.state));
    if (["run", "other", "statistic"].some((key) => key in direct)) {
      this.#chooseRuns();
      this.#load().catch((error) => this.#fail(error));
    } else this.draw();
  }

  // --- what is visible

  get statistic() {
    const { statistics } = this.panels[0].overview;
    return statistics.find((known) => known.name === this.state.statistic) ?? statistics[0];
  }

  whole() {
    const rowCount = Math.max(...this.panels.map((panel) => this.#rows(panel).length));
    return wholeView(
      this.panels.map((panel) => panel.extent(this.statistic)),
      rowCount,
    );
  }

  view() {
    const whole = this.whole();
    return (this.state.zoom && limit(this.state.zoom, whole)) ?? whole;
  }

  #rows(panel) {
    return panel.rows(this.state, this.statistic);
  }

  /** Draws soon; many calls in one frame draw once. */
  draw() {
    if (!this.panels.length || this.drawing) return;
    this.drawing = true;
    requestAnimationFrame(() => this.#drawNow());
  }

  #drawNow() {
    this.drawing = false;
    if (this.body.hidden || !this.panels.length || !this.stage.clientWidth) return;
    if (this.panels.some((panel) => !panel.field(this.statistic))) return;
    const began = performance.now();
    this.theme ??= readTheme();
    const { statistic, theme, state } = this;
    const view = this.view();
    const isZoomed = state.zoom !== null;
    const parts = this.panels.map((panel) => {
      const rows = this.#rows(panel);
      const field = panel.visibleField(statistic, view, isZoomed, rows);
      return { panel, rows, field, values: panel.values(field, statistic, state.mode) };
    });
    const scale = this.#scale();
    const rowCount = Math.max(...parts.map((part) => part.rows.length));
    this.#drawToolbar(isZoomed);
    for (const { panel, rows, field, values } of parts) {
      panel.title.hidden = parts.length === 1;
      const size = this.#size(rowCount, parts.length);
      panel.draw({
        ...size,
        statistic,
        theme,
        view: clampRows(view, rows.length),
        isZoomed,
        rows,
        field,
        values,
        scale,
        selection: this.#selection(panel),
      });
    }
    drawLegend(this.legend, scale, statistic, state.mode, theme);
    this.#drawSide();
    document.documentElement.dataset.drawMs = (performance.now() - began).toFixed(1);
  }

  /** One scale for all runs; a zoom does not change it. */
  #scale() {
    const { statistic, state, panels } = this;
    const fields = panels.map((panel) => panel.field(statistic));
    const key = `${statistic.name} ${state.mode}`;
    const isKnown =
      this.known?.key === key && this.known.fields.every((field, i) => field === fields[i]);
    if (!isKnown || this.known.fields.length !== fields.length) {
      const values = fields.map((field, i) => panels[i].values(field, statistic, state.mode));
      this.known = { key, fields, scale: makeScale(statistic, state.mode, values) };
    }
    return this.known.scale;
  }

  #size(rowCount, panelCount) {
    const style = getComputedStyle(this.stage);
    const columns = panelCount > 1 && style.gridTemplateColumns.split(" ").length > 1 ? 2 : 1;
    const gap = parseFloat(style.columnGap) || 0;
    const width = Math.floor((this.stage.clientWidth - gap * (columns - 1)) / columns);
    const room = Math.max(window.innerHeight - 300, 220);
    const height = Math.max(Math.min(rowCount * 38 + 30, room), 130);
    return { width, height, gutter: Math.round(Math.min(Math.max(width * 0.24, 96), 250)) };
  }

  #selection(panel) {
    const { layer, step } = this.state;
    if (layer === null) return null;
    const index = panel.overview.layers.findIndex((known) => known.name === layer);
    return index < 0 ? null : { layer: index, step: step ?? panel.overview.lastStep };
  }

  #drawToolbar(isZoomed) {
    const { groups, overview } = this.panels[0];
    const depths = deepest(groups);
    const { folded } = this.state;
    const isFoldedAt = (depth) => {
      const paths = depth ? groupsAtDepth(groups, depth) : [];
      return paths.length === folded.size && paths.every((path) => folded.has(path));
    };
    const depth = Array.from({ length: depths + 1 }, (_, i) => i).find(isFoldedAt);
    const content = {
      state: this.state,
      runs: this.runs,
      statistics: overview.statistics,
      depths,
      foldedDepth: depth === undefined ? "" : String(depth),
      isZoomed,
    };
    drawToolbar(this.toolbar, content, (changes) => this.change(changes));
  }

  #drawSide() {
    const alerts = this.panels.flatMap((panel) =>
      panel.alerts.map((alert) =>
        this.panels.length > 1 ? { ...alert, run: panel.run, original: alert } : alert,
      ),
    );
    this.alertList.show(alerts, this.chosenAlert);
    const panel = this.#detailPanel();
    const layer = panel?.overview.layers.find((known) => known.name === this.state.layer);
    if (!layer) return this.detail.clear();
    this.detail.show({
      layer,
      step: this.state.step,
      statistic: this.statistic,
      statistics: panel.overview.statistics,
      view: this.view(),
      alerts: panel.alerts.filter((alert) => alert.module_name === layer.name),
      theme: this.theme,
    });
  }

  /** The run whose details are shown: that of the last click, if it has the layer. */
  #detailPanel() {
    const has = (panel) => panel.overview.layers.some((layer) => layer.name === this.state.layer);
    const focused = this.panels.find((panel) => panel.run === this.focusedRun);
    return focused && has(focused) ? focused : this.panels.find(has);
  }

  // --- what people do

  #panelEvents(run) {
    const panel = () => this.panels.find((known) => known.run === run);
    return {
      select: (layer, step) => {
        this.focusedRun = run;
        this.chosenAlert = null;
        this.#select(
          panel().overview.layers[layer].name,
          step ?? this.state.step ?? panel().overview.lastStep,
        );
      },
      hover: (cell, x, y, group) => this.#hover(panel(), cell, x, y, group),
      zoom: (view) => this.change({ zoom: limit(view, this.whole()) }),
      scale: (factor, x, y) =>
        this.change({ zoom: limit(scaleView(this.view(), factor, x, y), this.whole()) }),
      pan: (dx, dy) =>
        this.change({ zoom: limit(panView(this.view(), dx, dy, this.whole()), this.whole()) }),
      unzoom: () => this.change({ zoom: null }),
      fold: (path) => this.#toggleFold(path),
      changed: () => this.draw(),
      failed: (error) => this.#fail(error),
    };
  }

  #keys() {
    return {
      moveStep: (count) => this.#moveStep(count),
      moveLayer: (count) => this.#moveLayer(count),
      zoom: (factor) => this.#zoomAtSelection(factor),
      unzoom: () => this.change({ zoom: null }),
      close: () =>
        this.state.layer === null ? this.change({ zoom: null }) : this.#select(null, null),
      alert: (direction) => this.#moveAlert(direction),
      fold: () => this.#foldSelection(),
      search: () => this.toolbar.querySelector("input").focus(),
    };
  }

  #select(layer, step) {
    const isOther = layer !== this.state.layer;
    let { zoom } = this.state;
    if (zoom && layer !== null)
      zoom = limit(reveal(this.view(), step, this.#rowIndex(layer), this.whole()), this.whole());
    this.change({ layer, step, zoom });
    this.#announce();
    if (isOther && layer !== null) this.#loadDetailSoon();
  }

  #rowIndex(name) {
    const panel = this.#detailPanel() ?? this.panels[0];
    const index = panel.overview.layers.findIndex((layer) => layer.name === name);
    return this.#rows(panel).findIndex((row) => row.layers.includes(index));
  }

  #moveStep(count) {
    const panel = this.#detailPanel() ?? this.panels[0];
    const { steps } = panel.field(this.statistic);
    if (!steps.length) return;
    const { layer, step } = this.state;
    const column = step === null ? steps.length - 1 : Math.max(columnAt(steps, step), 0) + count;
    const clamped = Math.min(Math.max(column, 0), steps.length - 1);
    this.#select(
      layer ?? panel.overview.layers[this.#rows(panel)[0].layers[0]].name,
      steps[clamped],
    );
  }

  #moveLayer(count) {
    const panel = this.#detailPanel() ?? this.panels[0];
    const rows = this.#rows(panel);
    if (!rows.length) return;
    const current =
      this.state.layer === null ? (count > 0 ? -1 : 0) : this.#rowIndex(this.state.layer);
    const row = Math.min(Math.max(current + count, 0), rows.length - 1);
    this.#select(
      panel.overview.layers[rows[row].layers[0]].name,
      this.state.step ?? panel.overview.lastStep,
    );
  }

  #moveAlert(direction) {
    const alerts = this.panels.flatMap((panel) => panel.alerts).sort((a, b) => a.step - b.step);
    if (!alerts.length) return;
    const at = alerts.indexOf(this.chosenAlert);
    const next = at < 0 ? (direction > 0 ? 0 : alerts.length - 1) : at + direction;
    this.#chooseAlert(alerts[(next + alerts.length) % alerts.length]);
  }

  #chooseAlert(alert) {
    this.chosenAlert = alert;
    if (alert.run) this.focusedRun = alert.run;
    const panel = this.panels.find((known) => known.run === alert.run) ?? this.panels[0];
    const layer = panel.overview.layers.find((known) => known.name === alert.module_name);
    const hidden = layer && this.#rowIndex(layer.name) < 0;
    if (hidden) Object.assign(this.state, { search: "", folded: new Set(), zoom: null });
    this.#select(layer ? layer.name : this.state.layer, alert.step);
  }

  #zoomAtSelection(factor) {
    const view = this.view();
    const { layer, step } = this.state;
    const x = step === null ? 0.5 : (step - view.step0) / (view.step1 - view.step0);
    const row = layer === null ? -1 : this.#rowIndex(layer);
    const y = row < 0 ? 0.5 : (row + 0.5 - view.row0) / (view.row1 - view.row0);
    this.change({ zoom: limit(scaleView(view, factor, x, y), this.whole()) });
  }

  #toggleFold(path) {
    const folded = new Set(this.state.folded);
    if (!folded.delete(path)) folded.add(path);
    this.change({ folded, zoom: null });
  }

  #foldSelection() {
    const panel = this.#detailPanel();
    const layer = panel?.overview.layers.find((known) => known.name === this.state.layer);
    if (!layer) return;
    const row = this.#rows(panel)[this.#rowIndex(layer.name)];
    const path = row?.folded ?? innermostOpen(layer, panel.groups, this.state.folded);
    if (path) this.#toggleFold(path);
  }

  // --- details, tooltip, messages

  #loadDetailSoon() {
    clearTimeout(this.detailTimer);
    this.detailTimer = setTimeout(() => this.#loadDetail(), DETAIL_DELAY_MS);
  }

  async #loadDetail() {
    const panel = this.#detailPanel();
    const layer = panel?.overview.layers.find((known) => known.name === this.state.layer);
    if (!layer) return;
    await this.detail.load(this.source, panel.run, layer);
    this.draw();
  }

  #hover(panel, cell, x, y, group) {
    if (group) return this.tooltip.showGroup(panel, group, this.state.folded.has(group), x, y);
    if (!cell) return this.tooltip.hide();
    const row = this.#rows(panel)[cell.row];
    this.tooltip.showCell(panel, cell, row, this.statistic, x, y);
  }

  #announce() {
    const { layer, step } = this.state;
    const panel = this.#detailPanel();
    if (layer === null || !panel) return;
    const index = panel.overview.layers.findIndex((known) => known.name === layer);
    const value = valueAt(panel.field(this.statistic), index, step);
    this.announcer.textContent = `${titleOf(panel.overview.layers[index])}, step ${step}: ${formatValue(this.statistic, value)}`;
  }

  #message(node) {
    this.body.hidden = true;
    fill(this.messageArea, node);
    document.documentElement.dataset.ready =
      node.dataset.state === "loading" ? "false" : node.dataset.state;
  }

  #fail(error) {
    if (error instanceof NewerFormatError) return this.#message(newerFormatMessage(error.message));
    this.#message(failureMessage(error.message, () => this.start()));
  }
}
