// What users do with the picture: move, select, zoom, fold, follow alerts; each is one update of the state.
// And the keys that do it.

import { clamp } from "./format.js";
import { columnAt } from "./field.js";
import { groupsAtDepth, rowOfLayer } from "./rows.js";
import { keyOfAlert, toggled } from "./state.js";
import { aroundStep, limit, reveal, scaleView } from "./view.js";

export const zoomTo = (page, view) => page.update({ zoom: limit(view, page.whole()) });

export const unzoom = (page) => page.update({ zoom: null });

/** Lists the runs, also new ones, to choose `run` or `other`, the one to compare with. */
export function listRuns(page, table, filter = page.state.filter) {
  if (page.runs.length < 2) return;
  page.update({ table, filter });
  page.refresh();
}

/** Selects a cell, and shows it; the drawer opens. */
export function select(page, name, step) {
  const row = rowOfLayer(page.rows(page.current), page.current.indexOf(name));
  const view = page.state.zoom && reveal(page.view(), step, row, page.whole());
  const zoom = view && limit(view, page.whole());
  page.update({ layer: name, step, side: true, ...(zoom ? { zoom } : {}) });
}

/** Selects what was clicked in the picture of a run, at the selected step or the last one without another. */
export function selectIn(page, panel, name, step) {
  const at = step ?? page.state.step ?? panel.overview.lastStep;
  page.update({ of: panel.name === page.state.other, alert: "", onsets: null });
  select(page, name, at);
}

/** Closes the details, or where there are none shows everything. */
export function close(page) {
  const { layer, alert, onsets, side } = page.state;
  if (layer === null && !alert && onsets === null && !side) return unzoom(page);
  page.update({ layer: null, step: null, alert: "", onsets: null, side: false });
  page.focusPicture();
}

/** Moves the selection by measured steps and by rows; without one, it begins at the last step and the first row. */
export function move(page, byStep, byRow = 0) {
  const { current: panel, state: { layer, step } } = page;
  const [rows, steps] = [page.rows(panel), panel.steps(page.statistic)];
  if (!rows.length || !steps.length) return;
  const before = rowOfLayer(rows, panel.indexOf(layer));
  const [first] = rows[clamp(before + byRow, 0, rows.length - 1)].layers;
  const name = byRow || before < 0 ? panel.overview.layers[first].name : layer;
  const column = clamp(columnAt(steps, step ?? Infinity) + byStep, 0, steps.length - 1);
  select(page, name, byStep ? steps[column] : (step ?? panel.overview.lastStep));
}

function moveAlert(page, direction) {
  const alerts = page.alerts.sort((a, b) => a.step - b.step);
  if (!alerts.length) return;
  const at = alerts.indexOf(page.chosenAlert);
  const next = at < 0 ? (direction > 0 ? 0 : -1) : at + direction;
  chooseAlert(page, alerts.at(next % alerts.length));
}

/** Goes to an alert: its layer is selected; its statistic and the steps around it are shown. */
export function chooseAlert(page, alert) {
  const panel = page.panels.find((known) => known.alerts.includes(alert));
  const { layers, statistics } = panel.overview;
  const layer = layers[alert.layer];
  const isKnown = statistics.some(({ name }) => name === alert.statistic);
  page.update({
    of: panel.name === page.state.other,
    alert: keyOfAlert(alert),
    onsets: null,
    side: true,
    ...(isKnown && { statistic: alert.statistic }),
    ...(layer && { layer: layer.name }),
  });
  if (layer && rowOfLayer(page.rows(panel), alert.layer) < 0) {
    page.update({ search: "", folded: new Set(), all: true });
  }
  goTo(page, alert.step);
  page.scrollToTop();
}

export function goTo(page, step) {
  const whole = page.whole();
  page.update({ step, zoom: limit(aroundStep(step, whole, page.current.steps(page.statistic)), whole) });
}

export function listOnsets(page) {
  page.update({ onsets: page.state.step ?? page.current.overview.lastStep, side: true });
}

function zoomAtSelection(page, factor) {
  const view = page.view();
  const { layer, step } = page.state;
  const x = step === null ? 0.5 : (step - view.step0) / (view.step1 - view.step0);
  const row = rowOfLayer(page.rows(page.current), page.current.indexOf(layer));
  const y = row < 0 ? 0.5 : (row + 0.5 - view.row0) / (view.row1 - view.row0);
  zoomTo(page, scaleView(view, factor, x, y));
}

export function toggleFold(page, name) {
  page.update({ folded: toggled(page.state.folded, name), zoom: null });
}

/** Folds all groups at a depth, 1 being the outermost; 0: none. */
export function foldAt(page, depth, more) {
  const folded = new Set(depth ? groupsAtDepth(page.panels[0].groupings[page.state.order], depth) : []);
  page.update({ folded, zoom: null, ...more });
}

/** Folds or unfolds the group around the selected layer. */
function foldSelection(page) {
  const { layer, folded, order } = page.state;
  const index = page.current.indexOf(layer);
  const row = page.rows(page.current).find(({ layers }) => layers.includes(index));
  const innermostOpen = page.current.groupings[order].keys[index]?.findLast((name) => !folded.has(name));
  const name = row?.folded ?? innermostOpen;
  if (name) toggleFold(page, name);
}

const FAR = 10;

// What a key does, `by` one or with Shift ten.
const KEYS = {
  ArrowLeft: (page, by) => move(page, -by),
  ArrowRight: (page, by) => move(page, by),
  ArrowUp: (page, by) => move(page, 0, -by),
  ArrowDown: (page, by) => move(page, 0, by),
  PageUp: (page) => move(page, 0, -FAR),
  PageDown: (page) => move(page, 0, FAR),
  Home: (page) => move(page, -Infinity),
  End: (page) => move(page, Infinity),
  f: foldSelection,
  w: listOnsets,
  "+": (page) => zoomAtSelection(page, 0.5),
  "=": (page) => zoomAtSelection(page, 0.5),
  "-": (page) => zoomAtSelection(page, 2),
  0: unzoom,
  Escape: close,
  n: (page) => moveAlert(page, 1),
  p: (page) => moveAlert(page, -1),
  "/": (page) => page.searchLayers(),
  r: (page) => listRuns(page, "run"),
};

export const KEY_HELP =
  "Keys: arrows move (with Shift by ten), + and − zoom, 0 shows everything, n and p go to the next " +
  "and previous alert, f folds the group, / filters layers, r lists the runs, w lists the layers that changed first, Esc closes.";

/** Listens everywhere but in fields and dialogs; to Page Up and Down only in the picture. Keys act on its run. */
export function watchKeys(page) {
  document.addEventListener("keydown", (event) => {
    const { key, target } = event;
    if (!Object.hasOwn(KEYS, key) || event.ctrlKey || event.metaKey || event.altKey) return;
    if (page.message || !page.panels.length || document.querySelector("dialog[open]")) return;
    if (target.closest("input, select") || (key.startsWith("Page") && !target.closest(".heatmap"))) return;
    event.preventDefault();
    const { run } = target.closest(".panel")?.dataset ?? {};
    if (run !== undefined) page.update({ of: run === page.state.other });
    KEYS[key](page, event.shiftKey ? FAR : 1);
  });
}
