// All runs in a table to choose from: filtered, sorted, with what tells them apart.

import { kindTitle } from "./alert_list.js";
import { element, fill } from "./dom.js";
import { formatNumber, formatStep } from "./format.js";
import { Parallel } from "./parallel.js";
import { RunCurves } from "./run_curves.js";

const collator = new Intl.Collator("en", { numeric: true });

/**
 * @typedef {Object} Column
 * @property {string} title
 * @property {(run: Object) => string|number|undefined} key what it is sorted by
 * @property {(run: Object) => string|Node} show
 * @property {boolean} [isNumber]
 */

const [LAST_LOSS, BEST_LOSS] = [loss("Last loss", "last"), loss("Best loss", "best")];

/** @type {Column[]} */
const COLUMNS = [
  { title: "Status", key: (run) => run.status, show: statusOf },
  {
    title: "Started",
    key: (run) => -run.started, // the newest first
    show: (run) => ago(run.started),
  },
  {
    title: "Last step",
    key: (run) => run.lastStep,
    show: (run) => formatStep(run.lastStep),
    isNumber: true,
  },
  LAST_LOSS,
  BEST_LOSS,
  {
    title: "First alert",
    key: (run) => run.alert && run.alert.kind,
    show: (run) => (run.alert ? alertOf(run.alert) : run.status ? "none" : ""),
  },
];

export class RunTable {
  /** @param {Object} source */
  constructor(source) {
    this.source = source;
    this.sortedBy = "Started";
    this.isReversed = false;
    this.search = element("input", {
      type: "search",
      placeholder: "name, status, alert or lr=0.1",
      "aria-label": "Filter runs",
      oninput: () => this.#draw(),
      onkeydown: (event) => {
        if (event.key !== "Enter" || this.shown.length !== 1) return;
        event.preventDefault(); // else it also presses the button that gets the focus back
        this.#choose(this.shown[0]);
      },
    });
    this.count = element("span", { class: "count", role: "status" });
    this.title = element("h2", { id: "runs-title" });
    this.table = element("table", {});
    this.widths = new Map(); // of columns that were dragged
    const resized = new MutationObserver((all) => all.forEach(({ target }) => this.#resized(target)));
    resized.observe(this.table, { subtree: true, attributeFilter: ["style"] });
    this.curves = new RunCurves(source);
    this.parallel = new Parallel(() => this.#draw());
    this.node = element(
      "dialog",
      { class: "runs", "aria-labelledby": "runs-title" },
      element(
        "header",
        {},
        this.title,
        this.search,
        this.count,
        element("button", { onclick: () => this.node.close() }, "Close"),
      ),
      element(
        "div",
        { class: "runs-scroll", tabindex: "0", role: "region", "aria-label": "Runs" },
        this.table,
      ),
      this.curves.node,
      this.parallel.node,
    );
  }

  /**
   * @param {Object[]} runs what is known at once; the rest is loaded
   * @param {string} current name of the chosen run
   * @param {string} which `run`, or `other` for one beside it
   * @param {Object} about what curves are to show: see `RunCurves.show`
   * @param {(name: string) => void} onChoose
   */
  async open(runs, current, which, about, onChoose) {
    this.runs = runs;
    this.about = about;
    this.curves.forget();
    this.parallel.ranges.clear();
    this.current = current;
    this.onChoose = onChoose;
    this.title.textContent = which === "run" ? "Runs" : "A run beside it";
    this.search.value = "";
    delete this.node.dataset.loaded;
    this.#draw();
    this.node.showModal();
    this.search.focus();
    try {
      this.runs = await this.source.runTable();
      this.node.dataset.loaded = "true";
      this.#draw();
    } catch (error) {
      this.count.textContent = error.message;
    }
  }

  #draw() {
    const matching = this.runs.filter(this.#matches());
    this.parallel.show(matching, [...hparamColumns(matching), BEST_LOSS, LAST_LOSS], this.about.theme);
    const within = matching.filter((run) => this.parallel.accepts(run));
    const columns = [
      { title: "Run", key: (run) => run.name, show: (run) => this.#name(run) },
      ...COLUMNS,
      ...hparamColumns(within),
    ];
    const shown = (this.shown = this.#sorted(columns, within));
    this.curves.show(shown.map((run) => run.name), this.about);
    const isFilled = ({ show }) => !shown.length || shown.some((run) => show(run) !== "");
    const filled = columns.filter(isFilled);
    this.count.textContent =
      shown.length === this.runs.length
        ? `${shown.length} run${shown.length === 1 ? "" : "s"}`
        : `${shown.length || "none"} of ${this.runs.length} runs`;
    fill(
      this.table,
      element("thead", {}, element("tr", {}, ...filled.map((column) => this.#head(column)))),
      element("tbody", {}, ...shown.map((run) => this.#row(run, filled))),
    );
    for (const head of this.table.tHead.rows[0].cells)
      head.style.width = this.widths.get(head.textContent) ?? "";
  }

  /** Cells are cut to the width that their column's head was dragged to. */
  #resized({ tagName, cellIndex, textContent, style }) {
    if (tagName !== "TH") return;
    this.widths.set(textContent, style.width);
    for (const { cells } of this.table.tBodies[0].rows) cells[cellIndex].style.maxWidth = style.width;
  }

  /** Whether each word of the filter is in the run's texts. */
  #matches() {
    const words = this.search.value.toLowerCase().split(/\s+/).filter(Boolean);
    return (run) => {
      const hparams = Object.entries(run.hparams ?? {}).map(([name, value]) => `${name}=${value}`);
      const alert = run.alert ? `${run.alert.kind} ${alertText(run.alert)}` : "";
      const text = [run.name, run.status, alert, ...hparams].join(" ").toLowerCase();
      return words.every((word) => text.includes(word));
    };
  }

  /** In the order of a column; what has no value comes last. */
  #sorted(columns, runs) {
    const { key } = columns.find((column) => column.title === this.sortedBy) ?? COLUMNS[1];
    const sign = this.isReversed ? -1 : 1;
    const isMissing = (value) => value == null || value !== value;
    return [...runs].sort((a, b) => {
      const [x, y] = [key(a), key(b)];
      if (isMissing(x) || isMissing(y)) return isMissing(x) - isMissing(y);
      const areNumbers = typeof x === "number" && typeof y === "number";
      return sign * (areNumbers ? x - y : collator.compare(String(x), String(y)));
    });
  }

  #head({ title, isNumber }) {
    const isSorted = title === this.sortedBy;
    const order = this.isReversed ? "descending" : "ascending";
    const sort = () => {
      this.isReversed = isSorted && !this.isReversed;
      this.sortedBy = title;
      this.#draw();
    };
    return element(
      "th",
      { scope: "col", class: isNumber ? "number" : "", "aria-sort": isSorted ? order : "none" },
      element("button", { dataset: { key: title }, onclick: sort }, title),
    );
  }

  #row(run, columns) {
    const cells = columns.map(({ show, isNumber }) =>
      element("td", { class: isNumber ? "number" : "" }, show(run)),
    );
    const isCurrent = run.name === this.current;
    return element(
      "tr",
      { class: isCurrent ? "chosen" : "", onclick: () => this.#choose(run) },
      ...cells,
    );
  }

  #name(run) {
    const isCurrent = run.name === this.current ? "true" : null;
    return element("button", { class: "run-link", "aria-current": isCurrent }, run.name);
  }

  #choose(run) {
    this.node.close();
    this.onChoose(run.name);
  }
}

function loss(title, which) {
  const value = (run) => (run.loss ? Number(run.loss[which]) : undefined); // NaN comes as a text
  return {
    title,
    key: value,
    show: (run) => (run.loss ? formatNumber(value(run)) : ""),
    isNumber: true,
  };
}

/** The hyperparameters in which the runs differ. */
function hparamColumns(runs) {
  const values = new Map();
  runs.forEach((run, index) => {
    for (const [name, value] of Object.entries(run.hparams ?? {})) {
      if (!values.has(name)) values.set(name, new Array(runs.length));
      values.get(name)[index] = String(value);
    }
  });
  const names = [...values.keys()].filter((name) => new Set(values.get(name)).size > 1);
  return names.map((name) => ({
    title: name,
    key: (run) => run.hparams?.[name],
    show: (run) => hparamText(run.hparams?.[name]),
    isNumber: runs.every((run) => typeof (run.hparams?.[name] ?? 0) === "number"),
  }));
}

function hparamText(value) {
  if (value == null) return "";
  return typeof value === "number" && !Number.isInteger(value) ? formatNumber(value) : String(value);
}

function statusOf({ status, written }) {
  if (!status) return "";
  const title = {
    live: "data has come within the last minutes",
    ended: "the logger was closed",
    died: `nothing more came, or it ended in an exception; last data ${ago(written)}`,
  }[status];
  return element("span", { class: `status ${status}`, title }, status);
}

function alertOf(alert) {
  const { severity } = alert;
  return element("span", { class: `first-alert ${severity}`, title: severity }, alertText(alert));
}

function alertText({ kind, step, module_name: layer }) {
  return `${kindTitle(kind)}${layer ? ` in ${layer}` : ""}, step ${formatStep(step)}`;
}

/** A time before now in words. */
export function ago(seconds) {
  const past = Date.now() / 1000 - seconds;
  if (!seconds || !Number.isFinite(past)) return "";
  const units = [
    ["day", 86400],
    ["h", 3600],
    ["min", 60],
  ];
  const [name, size] = units.find(([, length]) => past >= length) ?? ["", 0];
  if (!size) return "just now";
  const count = Math.floor(past / size);
  return `${count} ${name}${name === "day" && count > 1 ? "s" : ""} ago`;
}
