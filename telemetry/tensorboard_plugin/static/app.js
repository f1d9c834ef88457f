// The page: holds its state, loads data and draws.

import { Actions } from "./actions.js";
import { Announcer, Tooltip } from "./words.js";
import { fill } from "./dom.js";
import { buildFrame, emptyMessage, failureMessage, loadingMessage, newerFormatMessage } from "./frame.js";
import { moveHairs, watchPlots } from "./crosshair.js";
import { hoverAgain, watchKeys } from "./input.js";
import { Large } from "./large.js";
import { drawLegend } from "./scale.js";
import { Live } from "./live.js";
import { Panel } from "./panel.js";
import { fromLink, keyOfAlert, toLink } from "./permalink.js";
import { groupsAtDepth } from "./rows.js";
import { RunTable } from "./run_table.js";
import { Shown } from "./shown.js";
import { Side } from "./side.js";
import { NewerFormatError } from "./source.js";
import { limit, openingView, wholeView } from "./view.js";
import { theme as readTheme } from "./host.js";
import { drawToolbar } from "./toolbar.js";

const DETAIL_DELAY_MS = 120;

export class App {
  /**
   * @param {HTMLElement} root
   * @param {Object} source where data comes from
   * @param {{read: () => Object, write: (link: Object, isNew: boolean) => void}} address
   */
  constructor(root, source, address) {
    this.source = source;
    this.address = address;
    this.state = fromLink(address.read());
    this.actions = new Actions(this);
    this.panels = [];
    this.shown = new Shown(this);
    this.theme = null;
    this.isSideOpen = this.state.layer !== null; // where the window is narrow
    this.tooltip = new Tooltip();
    this.large = new Large();
    this.announcer = new Announcer(this);
    this.side = new Side(this);
    this.live = new Live(source.isLive ? () => this.refresh() : null, () => this.#isEmpty());
    this.runTable = new RunTable(source, () => this.state, () => this.change({}));
    Object.assign(this, buildFrame(root, this));
    const hover = (found, event) => this.hoverPlot(found, event.clientX, event.clientY);
    watchPlots(root, hover, (found, canvas) => this.actions.clickPlot(found, canvas));
    new ResizeObserver(() => this.draw()).observe(this.stage);
  }

  /** Loads and draws. A failure becomes a message with a button to try again. */
  async start() {
    this.#message(loadingMessage());
    try {
      await this.#open(await this.source.runs());
    } catch (error) {
      this.fail(error);
    }
  }

  async #open(runs) {
    this.runs = runs;
    if (!runs.length) return this.#message(emptyMessage());
    this.#checkRuns();
    await this.#load().catch((error) => this.fail(error));
  }

  /** Whether no run has data yet. */
  #isEmpty() {
    const hasData = (panel) => [...panel.fields.values()].some((field) => field.steps.length);
    return this.runs?.length === 0 || (this.panels.length > 0 && !this.panels.some(hasData));
  }

  /** Reads new data; the current view stays, also after an error. */
  async refresh() {
    if (this.refreshing) return;
    this.refreshing = true;
    try {
      const { run } = this.state;
      const runs = await this.source.runs();
      if (this.state.run !== run) return; // chosen meanwhile, and perhaps newer than the list
      const isGone = !runs.some((known) => known.name === run);
      if (!this.panels.length || isGone) return await this.#open(runs);
      this.runs = runs;
      const alertCount = this.#alertCount();
      await Promise.all(this.panels.map((panel) => panel.refresh(this.state.statistic)));
      await Promise.all(this.panels.map((panel) => panel.load(this.state.statistic))); // chosen since
      this.live.said = "";
      this.#ready();
      this.announcer.newAlerts(alertCount);
      if (this.state.layer !== null) this.#loadDetail();
    } catch (error) {
      this.live.said = `could not be read again: ${error.message}`;
      this.draw();
    } finally {
      this.refreshing = false;
    }
  }

  /** Applies the colors at once: a printed page is not drawn again. */
  setTheme(theme) {
    this.theme = theme;
    this.#drawNow();
  }

  /** Applies the state of a link, as when the browser goes back. */
  follow(link) {
    const { run, other, statistic } = this.state;
    this.state = fromLink(link);
    if (!this.state.table) this.runTable.node.close();
    if (!this.panels.length) return;
    this.#checkRuns();
    const isLoaded =
      this.state.run === run && this.state.other === other && this.state.statistic === statistic;
    if (!isLoaded) return this.#load().catch((error) => this.fail(error));
    if (this.state.layer !== null) this.loadDetailSoon();
    this.#loadOnsetsOfAlert();
    this.#openTable();
    this.draw();
  }

  /** Replaces missing runs by the newest run, with a notice. */
  #checkRuns() {
    const { state } = this;
    const known = new Set(this.runs.map((run) => run.name));
    const missing = [state.run, state.other].filter((name) => name && !known.has(name));
    if (!known.has(state.run)) state.run = this.runs[0].name;
    if (!known.has(state.other) || state.other === state.run) state.other = "";
    const names = missing.map((name) => `“${name}”`).join(" and ");
    this.missing.textContent = names && `No telemetry data of ${names}; showing “${state.run}”.`;
    this.missing.hidden = !names;
  }

  async #load() {
    const { run, other, statistic } = this.state;
    const names = other ? [run, other] : [run];
    const kept = new Map(this.panels.map((panel) => [panel.run, panel]));
    const panels = names.map(
      (name) => kept.get(name) ?? new Panel(this.source, name, this.actions.ofPanel(name)),
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
    const scrolling = this.source.isLive ? /^Page/ : /^(Page|Arrow|Home|End)/; // a report is long
    if (!this.panels.length) watchKeys(scrolling, this.actions.ofKeys());
    this.panels = panels;
    const { statistics } = panels[0].overview;
    if (!statistics.some((known) => known.name === statistic)) {
      return this.change({ statistic: statistics[0].name });
    }
    fill(this.stage, ...panels.map((panel) => panel.node));
    this.stage.classList.toggle("two", panels.length > 1);
    if (!kept.has(run)) this.#openAtStory();
    this.#ready();
    if (this.state.layer !== null) this.#loadDetail();
    this.#loadOnsetsOfAlert();
    this.#openTable();
  }

  /** Opens the table of runs if the link says so. */
  #openTable() {
    const { table } = this.state;
    if (table && !this.runTable.node.open) this.actions.chooseRun(table);
  }

  #loadOnsetsOfAlert() {
    const [alert, run] = [this.chosenAlert, this.focusedPanel()?.run];
    if (alert && !this.side.onsets.isOf(run, alert.step)) this.loadOnsets(run, alert.step);
  }

  /** The kind of values in the cells; a ratio of runs needs two. */
  get mode() {
    const { mode } = this.state;
    return mode === "run" && this.panels.length < 2 ? "value" : mode;
  }

  /** The alert that was chosen, in the run of the last click. */
  get chosenAlert() {
    const { alert: key } = this.state;
    return (key && this.focusedPanel()?.alerts.find((alert) => keyOfAlert(alert) === key)) || null;
  }

  set chosenAlert(alert) {
    this.state.alert = alert ? keyOfAlert(alert) : "";
  }

  /** Zooms to the first NaN where NaN fills most of the picture. */
  #openAtStory() {
    const [panel] = this.panels;
    const { zoom, everything, layer, step } = this.state;
    if (zoom || everything || layer !== null || step !== null) return;
    const first = panel.firstNonfinite(this.statistic);
    const field = panel.field(this.statistic);
    const view = openingView(field, first, panel.alerts, this.whole());
    if (view) this.state.zoom = limit(view, this.whole());
  }

  #ready() {
    fill(this.messageArea);
    this.picture.hidden = this.side.node.hidden = false;
    this.heading.textContent = `Telemetry: ${this.state.run}`;
    document.title = this.heading.textContent;
    this.#drawNow();
    this.live.goOn();
    document.documentElement.dataset.ready = "true";
  }

  /** Writes the state into the link; see `writeLink`. */
  saveLink(isNew = false) {
    this.address.write(toLink(this.state), isNew);
  }

  /** Applies changes to the state, loads missing data, draws, and updates the link. */
  change(changes) {
    const { foldDepth, ...direct } = changes;
    if (foldDepth !== undefined) {
      const grouping = this.panels[0].grouping(this.state.order);
      const paths = foldDepth ? groupsAtDepth(grouping, foldDepth) : [];
      Object.assign(direct, { folded: new Set(paths), zoom: null });
    }
    if ("run" in direct) Object.assign(direct, { everything: false });
    const isOtherRun = "run" in direct || "other" in direct;
    if (isOtherRun) {
      this.chosenAlert = null;
      this.state.ofOther = false;
    }
    const isNew = ["run", "other", "zoom"].some(
      (key) => key in direct && JSON.stringify(direct[key]) !== JSON.stringify(this.state[key]),
    );
    Object.assign(this.state, direct);
    this.saveLink(isNew);
    if (isOtherRun) this.#checkRuns();
    if (isOtherRun || "statistic" in direct) {
      this.#load().catch((error) => this.fail(error));
    } else this.draw();
  }

  // --- the view

  get statistic() {
    const { statistics } = this.panels[0].overview;
    return statistics.find((known) => known.name === this.state.statistic) ?? statistics[0];
  }

  whole() {
    const rowCount = Math.max(...this.panels.map((panel) => this.rows(panel).length));
    return wholeView(this.panels.map((panel) => panel.extent(this.statistic)), rowCount);
  }

  view() {
    const whole = this.whole();
    return (this.state.zoom && limit(this.state.zoom, whole)) ?? whole;
  }

  rows(panel) {
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
    if (this.picture.hidden || !this.panels.length || !this.stage.clientWidth) return;
    if (this.panels.some((panel) => !panel.field(this.statistic))) return;
    const began = performance.now();
    this.theme ??= readTheme();
    const view = this.view();
    const faulty = this.runs.filter((run) => run.alertCount).length;
    this.sweep.hidden = this.runs.length < 2 || !faulty;
    this.sweep.textContent = `${faulty} of ${this.runs.length} runs have alerts`;
    drawToolbar(this.toolbar, this.#toolbarContent(), this);
    this.live.draw(Math.max(...this.panels.map((panel) => panel.overview.lastStep)));
    this.shown.settle(view);
    for (const [panel, shown] of this.shown.panels) panel.draw(shown);
    drawLegend(this.legend, this.shown.scale(), this.statistic, this.mode, this.theme);
    for (const panel of this.panels) hoverAgain(panel.heatmap);
    this.side.draw();
    moveHairs(this.hoveredStep ?? null);
    document.documentElement.dataset.drawMs = (performance.now() - began).toFixed(1);
  }

  #toolbarContent() {
    return {
      state: this.state,
      runs: this.runs,
      overview: this.panels[0].overview,
      grouping: this.panels[0].grouping(this.state.order),
      hasRoles: this.panels[0].grouping("role").groups.size > 0,
      isZoomed: this.state.zoom !== null,
      live: this.live.node,
      alertCount: this.#alertCount(),
    };
  }

  #alertCount() {
    return this.panels.reduce((sum, panel) => sum + panel.alerts.length, 0);
  }

  /** The run of the last click. */
  focusedPanel() {
    return this.panels[this.state.ofOther ? 1 : 0] ?? this.panels[0];
  }

  /** The run whose details are shown: that of the last click, if it has the layer. */
  detailPanel() {
    const has = (panel) => panel.overview.layers.some((layer) => layer.name === this.state.layer);
    return [this.focusedPanel(), ...this.panels].find(has);
  }

  // --- details, tooltip, messages

  loadDetailSoon() {
    clearTimeout(this.detailTimer);
    this.detailTimer = setTimeout(() => this.#loadDetail(), DETAIL_DELAY_MS);
  }

  async #loadDetail() {
    const panel = this.detailPanel();
    const layer = panel?.overview.layers.find((known) => known.name === this.state.layer);
    if (!layer) return;
    const runs = this.panels.map((known) => known.run);
    await this.side.detail.load(this.source, panel.run, runs, layer);
    this.draw();
  }

  async loadOnsets(run, step) {
    await this.side.onsets.load(this.source, run, step);
    this.draw();
  }

  openSide() {
    this.isSideOpen = true;
    this.draw();
  }

  /** Shows the cell under the pointer in the picture of a run; `x` and `y` in the window. */
  hover(panel, cell, x, y, group) {
    this.#moveCrosshair(cell, panel);
    if (group) return this.tooltip.showGroup(group, this.state.folded.has(group), x, y);
    if (!cell) return this.tooltip.hide();
    const row = this.rows(panel)[cell.row];
    if (row) this.tooltip.showCell(panel, cell, row, this.statistic, x, y);
  }

  /** The same in anything else that is drawn over steps or rows. */
  hoverPlot(found, x, y) {
    this.#moveCrosshair(found && { row: -1, ...found });
    if (found) this.tooltip.showLines(found, x, y);
    else this.tooltip.hide();
  }

  /** Shows a step, and a row by its layer's name, everywhere. */
  #moveCrosshair(at, origin = null) {
    this.hoveredStep = at?.step ?? null;
    moveHairs(this.hoveredStep);
    const name = at && origin ? origin.overview.layers[at.layer].name : null;
    for (const [panel, shown] of this.shown.panels) {
      panel.drawProfile(shown, this.hoveredStep);
      if (panel === origin) continue;
      panel.heatmap.hover = at && { step: at.step, row: name === null ? at.row : panel.rowNamed(shown.rows, name) };
      panel.heatmap.drawOverlay();
    }
  }

  #message(node) {
    this.picture.hidden = this.side.node.hidden = true;
    fill(this.messageArea, node);
    this.live.goOn();
    document.documentElement.dataset.ready =
      node.dataset.state === "loading" ? "false" : node.dataset.state;
  }

  fail(error) {
    if (error instanceof NewerFormatError) return this.#message(newerFormatMessage(error.message));
    this.#message(failureMessage(error.message, () => this.start()));
  }
}
