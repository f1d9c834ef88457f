// The state of the page as the values of a link, and back.

import { decode } from "./host.js";

/**
 * @typedef {Object} State
 * @property {string} run
 * @property {string} other the run to compare with, or ""
 * @property {boolean} ofOther whether the selected layer is that of the other run
 * @property {string} statistic
 * @property {string} mode `value`, `own`, `depth` or `run`
 * @property {string} search
 * @property {string} order `depth` or `role`
 * @property {boolean} everything whether all steps were asked for, also where the story is short
 * @property {boolean} all whether layers without the statistic are shown, too
 * @property {Set<string>} folded
 * @property {import("./heatmap.js").View|null} zoom
 * @property {string|null} layer name of the selected layer
 * @property {number|null} step
 * @property {string} alert the chosen one: see `keyOfAlert`
 * @property {string} histogram which of the layer's is shown; "": the first
 * @property {string} table the open table of runs: `run`, `other` to compare with, or ""
 * @property {string} filter of that table
 * @property {Set<string>} checked names of the runs that are drawn together
 * @property {Map<string, boolean>} columns whether the user shows a column, by its title
 * @property {number} smoothing of the curves of runs, 0 to 0.99
 * @property {boolean} bySeed whether these curves are grouped by seed
 */

/** @returns {State} */
export function defaultState() {
  return {
    run: "",
    other: "",
    ofOther: false,
    statistic: "grad_norm",
    mode: "value",
    order: "depth",
    everything: false,
    search: "",
    all: false,
    folded: new Set(),
    zoom: null,
    layer: null,
    step: null,
    alert: "",
    histogram: "",
    table: "",
    filter: "",
    checked: new Set(),
    columns: new Map(),
    smoothing: 0,
    bySeed: false,
  };
}

/** A key that identifies an alert within its run, also after a reload. */
export function keyOfAlert({ step, kind, module_name: layer }) {
  return [step, kind, layer ?? ""].join(" ");
}

/** @param {State} state */
export function toLink(state) {
  const { zoom } = state;
  return {
    run: state.run,
    other: state.other,
    statistic: state.statistic,
    mode: state.mode === "value" ? "" : state.mode,
    order: state.order === "depth" ? "" : state.order,
    search: state.search,
    all: state.all ? "1" : "",
    folded: toList(state.folded),
    zoom: zoom ? [zoom.step0, zoom.step1, zoom.row0, zoom.row1].map(round).join(",") : state.everything ? "all" : "",
    // The empty name is that of the model itself.
    layer: state.layer === null ? "" : `.${state.layer}`,
    of: state.ofOther && state.other && (state.layer !== null || state.alert) ? "other" : "",
    step: state.step === null ? "" : String(state.step),
    alert: state.alert,
    histogram: state.histogram,
    table: state.table,
    filter: state.filter,
    checked: toList(state.checked),
    columns: toList([...state.columns].map(([title, isShown]) => (isShown ? "+" : "-") + title)),
    smoothing: state.smoothing ? String(state.smoothing) : "",
    seeds: state.bySeed ? "grouped" : "",
  };
}

/** The state in a link, with defaults for invalid values. @returns {State} */
export function fromLink(link) {
  const state = defaultState();
  for (const name of ["run", "other", "statistic", "search", "alert", "histogram", "filter"]) {
    if (link[name]) state[name] = link[name];
  }
  if (["own", "depth", "run"].includes(link.mode)) state.mode = link.mode;
  if (link.order === "role") state.order = "role";
  state.all = link.all === "1";
  state.ofOther = link.of === "other";
  state.everything = link.zoom === "all";
  if (["run", "other"].includes(link.table)) state.table = link.table;
  state.folded = new Set(fromList(link.folded));
  state.checked = new Set(fromList(link.checked));
  for (const choice of fromList(link.columns)) state.columns.set(choice.slice(1), choice[0] === "+");
  if (link.smoothing > 0 && link.smoothing < 1) state.smoothing = Number(link.smoothing);
  state.bySeed = link.seeds === "grouped";
  const numbers = (link.zoom ?? "").split(",").map(Number);
  const [step0, step1, row0, row1] = numbers;
  if (numbers.length === 4 && step0 < step1 && row0 < row1) {
    state.zoom = { step0, step1, row0, row1 };
  }
  if (link.layer) state.layer = link.layer.slice(1);
  if (link.step && Number.isFinite(Number(link.step))) state.step = Number(link.step);
  return state;
}

/** Texts, which may hold commas, as one text. */
function toList(texts) {
  return [...texts].map(encodeURIComponent).join(",");
}

function fromList(text) {
  return text ? text.split(",").map(decode) : [];
}

function round(value) {
  return Math.round(value * 1000) / 1000;
}
