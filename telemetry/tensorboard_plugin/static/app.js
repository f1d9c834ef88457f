// The page: where it begins, its state, its runs, and what is drawn of them.

import { KEY_HELP, watchKeys } from "./actions.js";
import { columnAt, endOf, valueAt } from "./field.js";
import { alertAloud, formatValue } from "./format.js";
import { followTheme, onNavigation, onReload, readLink, writeLink } from "./host.js";
import { Picture } from "./panel.js";
import { Tooltip } from "./parts.js";
import { html, render as renderInto } from "./preact.js";
import { titleOf } from "./rows.js";
import { Run } from "./run.js";
import { Comparison, RunTable } from "./runs.js";
import { Side } from "./side.js";
import { EmbeddedSource, ServerSource } from "./source.js";
import { fromLink, isEntry, keyOfAlert, toLink } from "./state.js";
import { Toolbar } from "./toolbar.js";
import { limit, wholeView } from "./view.js";

const LIVE_EVERY_MS = 5000;

/** Called by TensorBoard once the module is loaded. */
export async function render() {
  document.documentElement.lang = "en";
  const source = new ServerSource();
  const style = document.createElement("link");
  Object.assign(style, { rel: "stylesheet", href: new URL("./style.css", import.meta.url).href });
  document.head.append(style);
  const root = document.body.appendChild(document.createElement("div"));
  root.id = "telemetry";
  const styled = new Promise((resolve) => (style.onload = style.onerror = resolve));
  const runs = source.runs();
  runs.catch(() => null); // `start` says so
  await styled;
  const page = new Page(root, source);
  onReload(() => page.refresh());
  window.focus(); // else keys go to TensorBoard's tab
  await page.start(runs);
}

/** Called by a report, which has its data in an element of its file. */
export async function renderReport() {
  const source = new EmbeddedSource(JSON.parse(document.getElementById("data").textContent));
  const [run, other, more] = (await source.runs()).map(({ name }) => name);
  const link = other && !more ? { run, other, mode: "run" } : { run };
  await new Page(document.getElementById("telemetry"), source, link).start();
}

class Page {
  /** `source`: where data comes from; `link`: what is shown unless the address says otherwise. */
  constructor(root, source, link = {}) {
    Object.assign(this, { root, source });
    this.state = fromLink({ ...link, ...readLink() });
    this.state.side = this.state.layer !== null;
    this.runs = null;
    this.missing = ""; // about runs of the link that there are not
    this.panels = []; // the runs that are shown: one, or two to compare
    this.message = null; // in place of the picture
    this.isLive = false;
    this.failure = ""; // why the data could not be read again
    this.loading = null; // the data that the state asks for
    followTheme((theme) => {
      this.theme = theme;
      this.drawNow(); // at once: a printed page is not drawn again
    });
    onNavigation((found) => this.#become({ ...fromLink(found), side: this.state.side, full: this.state.full }));
    watchKeys(this);
    if (source.isLive) setInterval(() => this.#readAgain(), LIVE_EVERY_MS);
    addEventListener("resize", () => this.draw());
    matchMedia("print").addEventListener("change", () => this.drawNow());
  }

  // --- data

  start(runs) {
    this.#show({ state: "loading" });
    return this.refresh(runs);
  }

  /** Replaces missing runs by the newest run, with a notice. */
  #checkRuns() {
    const isKnown = (name) => this.runs.some((run) => run.name === name);
    const { run, other } = this.state;
    const missing = [run, other].filter((name) => name && !isKnown(name)).map((name) => `“${name}”`);
    const shown = isKnown(run) ? run : this.runs[0].name;
    this.state = { ...this.state, run: shown, other: isKnown(other) && other !== shown ? other : "" };
    this.missing = missing.length ? `No telemetry data of ${missing.join(" and ")}; showing “${shown}”.` : "";
  }

  /** Loads what the state says, unless it says something else by then. */
  async #load() {
    const { run, other, statistic } = this.state;
    const known = (name) => this.panels.find((panel) => panel.name === name);
    const names = [run, other].filter(Boolean);
    const panels = names.map((name) => known(name) ?? new Run(this.source, name, () => this.draw()));
    document.documentElement.dataset.ready = "loading";
    if (panels.some(({ overview }) => !overview)) this.#show({ state: "loading" });
    const loading = (this.loading = Promise.all(panels.map((panel) => panel.load(statistic))));
    const error = await loading.then(() => null, (reason) => reason);
    if (loading !== this.loading) return;
    if (error) return this.fail(error);
    this.panels = panels;
    const { statistics } = panels[0].overview;
    if (!statistics.some(({ name }) => name === this.state.statistic)) {
      return this.update({ statistic: statistics[0].name });
    }
    this.#show();
  }

  /** Reads the runs, and new data of those that are shown; the current view stays, also after an error. */
  async refresh(asked = this.source.runs()) {
    if (this.refreshing) return;
    this.refreshing = true;
    try {
      const { run } = this.state;
      const runs = await asked;
      if (this.state.run !== run) return; // chosen meanwhile, and perhaps newer than the list
      this.runs = runs;
      if (!runs.length) return this.#show({ state: "empty" });
      this.#checkRuns();
      const kept = this.panels.filter(({ name }) => runs.some((known) => known.name === name));
      await Promise.all(kept.map((panel) => panel.refresh(this.state.statistic)));
      this.failure = "";
      await this.#load();
    } catch (error) {
      if (this.message) return this.fail(error);
      this.failure = `could not be read again: ${error.message}`;
      this.draw();
    } finally {
      this.refreshing = false;
    }
  }

  setLive(isLive) {
    this.isLive = isLive;
    this.draw();
    this.refresh();
  }

  /** Reads again if the page is live or has no data yet, and is seen. */
  #readAgain() {
    const isEmpty = this.runs && this.panels.every(({ fields }) => [...fields.values()].every(({ steps }) => !steps.length));
    // Another dashboard of TensorBoard's hides the frame, not the document.
    const isSeen = window.innerWidth > 0 && !document.hidden;
    if (isSeen && (this.isLive || isEmpty)) this.refresh();
  }

  // --- state

  /** Changes the state: loads what is missing, draws, and writes the link. The only way to change it. */
  update(patch) {
    const before = this.state;
    const { run, other } = { ...before, ...patch };
    const isOtherRun = run !== before.run || other !== before.other;
    const forgotten = isOtherRun ? { alert: "", onsets: null, of: false, zoom: null } : {};
    this.#become({ ...before, ...forgotten, ...patch });
    writeLink(toLink(this.state), isEntry(before, this.state));
  }

  #become(state) {
    const before = this.state;
    this.state = state;
    if (!this.runs?.length) return;
    const isOtherRun = before.run !== state.run || before.other !== state.other;
    if (isOtherRun) this.#checkRuns();
    if (isOtherRun || before.statistic !== state.statistic) this.#load();
    else this.draw();
  }

  /** The kind of values in the cells; a ratio of runs needs two. */
  get mode() {
    const { mode } = this.state;
    return mode === "run" && this.panels.length < 2 ? "value" : mode;
  }

  get statistic() {
    const { statistics } = this.panels[0].overview;
    return statistics.find(({ name }) => name === this.state.statistic) ?? statistics[0];
  }

  get alerts() {
    return this.panels.flatMap((panel) => panel.alerts);
  }

  /** The run of the last click, whose alert is chosen, and whose selected layer is shown if it has the layer. */
  get current() {
    return this.panels[this.state.of ? 1 : 0] ?? this.panels[0];
  }

  get chosenAlert() {
    return this.current.alerts.find((alert) => keyOfAlert(alert) === this.state.alert) ?? null;
  }

  rows(panel) {
    return panel.rows(this.state, this.statistic);
  }

  whole() {
    const rowCount = Math.max(...this.panels.map((panel) => this.rows(panel).length));
    const measured = this.panels.map((panel) => panel.steps(this.statistic)).filter(({ length }) => length);
    return wholeView(measured.map((steps) => [steps[0], endOf(steps)]), rowCount);
  }

  view() {
    const whole = this.whole();
    return (this.state.zoom && limit(this.state.zoom, whole)) ?? whole;
  }

  // --- drawing

  #show(message = null) {
    this.message = message;
    this.drawNow();
    document.documentElement.dataset.ready = message?.state ?? "true";
  }

  fail(error) {
    this.#show({ state: "error", text: error.message });
  }

  /** Draws soon; many calls at once draw once. */
  draw() {
    if (this.drawing) return;
    this.drawing = true;
    queueMicrotask(() => this.drawNow());
  }

  /** Draws at once, such as what is about to be printed or saved. */
  drawNow() {
    this.drawing = false;
    if (!window.innerWidth) return; // another dashboard is shown
    // While a statistic loads, the picture of the one before stays.
    if (!this.message && (!this.panels.length || this.panels.some((panel) => !panel.field(this.statistic)))) return;
    const began = performance.now();
    renderInto(html`<${App} page=${this} />`, this.root);
    document.documentElement.dataset.drawMs = (performance.now() - began).toFixed(1);
  }

  focusPicture() {
    const pictures = this.root.querySelectorAll(".heatmap");
    (pictures[this.panels.indexOf(this.current)] ?? pictures[0])?.focus();
  }

  /** Moves the focus to the filter of layers, which a narrow window may hide. */
  searchLayers() {
    const input = this.root.querySelector(".toolbar input[type=search]");
    if (!input.checkVisibility()) this.update({ full: true });
    this.drawNow();
    input.focus();
  }

  scrollToTop() {
    this.root.querySelector(".side").scrollTop = 0; // of the drawer
    window.scrollTo({ top: 0 });
  }
}

function App({ page }) {
  const { message, runs, source, state } = page;
  const title = page.panels.length ? `Telemetry: ${state.run}` : "Telemetry";
  document.title = title;
  return html`
    ${!source.isLive && runs?.length > 1 && html`<${Comparison} page=${page} />`}
    <header class=${state.full ? "toolbar full" : "toolbar"}>${!message && html`<${Toolbar} page=${page} />`}</header>
    <div class="body">
      <main class="center">
        <h1 class="unseen">${title}</h1>
        <div class="message-area">${message && html`<${Message} ...${message} retry=${() => page.start()} />`}</div>
        <p class="missing-run" role="status" hidden=${!page.missing}>${page.missing}</p>
        ${!message && html`<${Picture} page=${page} /><p class="muted keys">${KEY_HELP}</p>`}
        <p class="announcer unseen" aria-live="polite">${!message && selectionAloud(page)}</p>
      </main>
      <aside class=${state.side ? "side open" : "side"} aria-label="Details and alerts" hidden=${message}>
        ${!message && html`<${Side} page=${page} />`}
      </aside>
    </div>
    ${state.table && !message && html`<${RunTable} page=${page} key=${state.table} />`}
    <${Tooltip} />
  `;
}

/** The selected cell with its value, and an alert there, for screen readers. */
function selectionAloud({ state: { layer, step }, statistic, current: panel, panels, chosenAlert: alert }) {
  const index = panel.indexOf(layer);
  if (index < 0 || step === null) return alert ? alertAloud(alert) : "";
  const field = panel.field(statistic); // undefined while it loads
  const at = field?.steps[columnAt(field.steps, step)] ?? step; // the step at which it was measured
  const run = panels.length > 1 ? `${panel.name}: ` : "";
  const value = field ? `: ${formatValue(statistic, valueAt(field, index, step))}` : "";
  const of = at === step ? "" : ` (of step ${at})`;
  const cell = `${run}${titleOf(panel.overview.layers[index])}, step ${step}${value}${of}`;
  return alert?.step === step ? `${alertAloud(alert)} ${cell}` : cell;
}

function Message({ state, text, retry }) {
  const [title, content] = {
    loading: ["Loading…", null],
    empty: [
      "No run with telemetry yet",
      html`<p>A run that HookLogger writes into this log directory appears once TensorBoard has reloaded its data. Runs
        with only scalars are under Time Series.</p>`,
    ],
    error: [
      "The data could not be shown",
      html`<p class="failure">${text}</p><button onclick=${retry}>Try again</button>`,
    ],
  }[state];
  return html`<div class="message" role="status" data-state=${state}><h1>${title}</h1>${content}</div>`;
}
