// The columns of the run table: values of each run, filters, and rank correlations.

import { capital, faultText, formatNumber, formatStep } from "./format.js";
import { html } from "./preact.js";

const MOST_METRICS = 4; // shown without being asked for
const FEWEST = 3; // runs that have a rank correlation
const TERM = /^([^<>=!]+)(<=|>=|!=|=|<|>)(.*)$/;
const UNITS = [["day", 86400], ["hour", 3600], ["minute", 60]]; // and their seconds
const relativeTime = new Intl.RelativeTimeFormat("en");
const TOLERANCE = 1e-6; // of two numbers that read the same

/**
 * @typedef {Object} Column
 * @property {string} title
 * @property {(run: Object) => string|number|undefined} key value to sort and filter by
 * @property {(run: Object) => any} show what a cell contains
 * @property {string} [group] `hparam` or `metric`
 * @property {boolean} [isNumber]
 * @property {boolean} [isHidden] unless the user chooses otherwise
 */

/** @type {Column[]} */
const BASE = [
  { title: "Status", key: (run) => run.status, show: statusOf },
  { title: "Started", key: (run) => -run.started /* the newest first */, show: (run) => ago(run.started) },
  number("Last step", (run) => run.lastStep, formatStep),
  number("Last loss", (run) => run.loss && Number(run.loss.last)), // NaN comes as a text
  number("Best loss", (run) => run.loss && Number(run.loss.best)),
  {
    title: "Worst alert",
    key: (run) => run.alert?.kind,
    show: (run) => (run.alert ? alertOf(run.alert) : run.status ? "none" : ""),
  },
  { ...number("Alerts", (run) => run.alertCount, String), isHidden: true },
];

/** All columns that one of the runs has a value for. @returns {Column[]} */
export function columnsOf(runs) {
  const metrics = namesIn(runs, "metrics").map((name, _, { length }) => ({
    ...number(name, (run) => run.metrics?.[name] && Number(run.metrics[name])),
    group: "metric",
    isHidden: length > MOST_METRICS,
  }));
  const described = runs.filter(({ hparams }) => hparams && Object.keys(hparams).length);
  const hparams = namesIn(runs, "hparams").map((name) => {
    const key = (run) => run.hparams?.[name];
    return {
      title: name,
      key,
      show: (run) => hparamText(key(run)),
      group: "hparam",
      isNumber: runs.every((run) => typeof (key(run) ?? 0) === "number"),
      isHidden: new Set(described.map((run) => String(key(run)))).size < 2, // they do not differ in it
    };
  });
  return [...BASE, ...metrics, ...hparams].filter(({ key }) => runs.some((run) => !isMissing(key(run))));
}

/**
 * Whether a run matches all terms: `lr<1e-3` and its like compare one column, by number where both
 * are numbers; other terms are parts of its name, status, alert or hyperparameters.
 * @returns {(run: Object) => boolean}
 */
export function matcher(text, columns) {
  const named = (name) => columns.find(({ title }) => nameOf(title) === nameOf(name));
  const tests = text.split(/\s+/).filter(Boolean).map((term) => {
    const [, name, operator, wanted] = TERM.exec(term) ?? [];
    if (name === undefined) return (run) => searched(run).includes(term.toLowerCase());
    const column = named(name);
    return (run) => compare(column?.key(run), operator, wanted);
  });
  return (run) => tests.every((test) => test(run));
}

/** What a column is called in a filter. */
function nameOf(title) {
  return title.toLowerCase().replaceAll(" ", "_");
}

function compare(value, operator, wanted) {
  if (isMissing(value)) return operator === "!=";
  if (wanted === "") return true; // still being typed
  const [a, b] = [value, wanted].map(Number);
  const areNumbers = typeof value === "number" && !Number.isNaN(b);
  const isSame = areNumbers
    ? a === b || Math.abs(a - b) <= TOLERANCE * Math.max(Math.abs(a), Math.abs(b))
    : String(value).toLowerCase() === wanted.toLowerCase();
  if (operator === "=" || operator === "!=") return isSame === (operator === "=");
  if (isSame) return operator.endsWith("=");
  return areNumbers && (operator.startsWith("<") ? a < b : a > b);
}

function searched(run) {
  const alert = run.alert ? `${run.alert.kind} ${alertText(run.alert)}` : "";
  const hparams = Object.entries(run.hparams ?? {}).map((pair) => pair.join("="));
  return [run.name, run.status, alert, ...hparams].join(" ").toLowerCase();
}

/** Spearman's rank correlation of two columns; null where too few runs have both, or one is constant. */
export function rankCorrelation(runs, a, b) {
  const pairs = runs.map((run) => [a.key(run), b.key(run)]);
  const known = pairs.filter((pair) => pair.every((value) => typeof value === "number" && value === value));
  if (known.length < FEWEST) return null;
  const [x, y] = [0, 1].map((i) => ranksOf(known.map((pair) => pair[i])));
  const mean = (known.length - 1) / 2;
  const covariance = (p, q) => p.reduce((sum, value, i) => sum + (value - mean) * (q[i] - mean), 0);
  const scale = Math.sqrt(covariance(x, x) * covariance(y, y));
  return scale > 0 ? covariance(x, y) / scale : null;
}

/** Ranks from 0; equal values share the mean of theirs. */
function ranksOf(values) {
  const sorted = [...values].sort((a, b) => a - b);
  return values.map((value) => (sorted.indexOf(value) + sorted.lastIndexOf(value)) / 2);
}

export function isMissing(value) {
  return value == null || value !== value;
}

function namesIn(runs, group) {
  return [...new Set(runs.flatMap((run) => Object.keys(run[group] ?? {})))];
}

function number(title, key, format = formatNumber) {
  const show = (run) => (key(run) == null ? "" : format(key(run)));
  return { title, key, show, isNumber: true };
}

function hparamText(value) {
  if (value == null) return "";
  return typeof value === "number" && !Number.isInteger(value) ? formatNumber(value) : String(value);
}

function statusOf({ status, written }) {
  if (!status) return "";
  const title = {
    live: "new data within the last minutes",
    ended: "the logger was closed",
    died: `no new data, or ended in an exception; last data ${ago(written)}`,
  }[status];
  return html`<span class="status ${status}" title=${title}>${status}</span>`;
}

function alertOf(alert) {
  const { severity } = alert;
  const title = alert.resolved ? `${severity}, resolved` : severity;
  return html`<span class="first-alert ${alert.resolved ? "note" : severity}" title=${title}>${alertText(alert)}</span>`;
}

function alertText(alert) {
  return `${capital(faultText(alert))}, step ${formatStep(alert.step)}${alert.resolved ? ", resolved" : ""}`;
}

/** Time since then as text. */
function ago(seconds) {
  const past = Date.now() / 1000 - seconds;
  if (!seconds || !Number.isFinite(past)) return "";
  const [unit, size] = UNITS.find(([, length]) => past >= length) ?? [];
  return unit ? relativeTime.format(-Math.floor(past / size), unit) : "just now";
}
