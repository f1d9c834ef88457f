// The list of runs, with filters, columns and curves: in a dialog, and in a report.

import { isLog, styleOf } from "./chart.js";
import { aligned } from "./field.js";
import { capital, faultText, formatNumber, formatStep } from "./format.js";
import { Curves, Dialog, DropDown, point, useAnswer, usePointed } from "./parts.js";
import { html, useLayoutEffect, useRef, useState } from "./preact.js";
import { toggled } from "./state.js";

const collator = new Intl.Collator("en", { numeric: true });

export function RunTable({ page }) {
  const { runs, state: { table: which, filter, checked: picked, columns: unusual } } = page;
  const [order, setOrder] = useState({ by: "Started", isReversed: false });
  const search = useRef();
  useLayoutEffect(() => search.current.focus(), []);
  const columns = columnsOf(runs);
  const offered = which === "run" ? runs : runs.filter(({ name }) => name !== page.state.run);
  const matching = offered.filter(matcher(filter, columns));
  const isFilled = ({ key }) => !matching.length || matching.some((run) => !isMissing(key(run)));
  const isShown = ({ title, isHidden = false }) => unusual.has(title) === isHidden;
  const visible = columns.filter((column) => isShown(column) && isFilled(column));
  const shown = sorted(columns, matching, order);
  const drawn = runs.filter(({ name }) => picked.has(name));
  const checked = drawn.map(({ name }) => name);

  const leave = () => page.update({ table: "", filter: "" });
  const choose = ({ name }) => {
    const chosen = which === "run" ? { run: name, layer: null, step: null } : { other: name };
    page.update({ table: "", filter: "", ...chosen });
  };
  const onkeydown = (event) => {
    if (event.key !== "Enter" || shown.length !== 1) return;
    event.preventDefault(); // else it also presses the button that gets the focus back
    choose(shown[0]);
  };
  const of = `${offered.length} run${offered.length === 1 ? "" : "s"}`;
  const count = shown.length === offered.length ? of : `${shown.length || "none"} of ${of}`;
  const choice = (column) => html`<label>
    <input type="checkbox" checked=${isShown(column)}
      onchange=${() => page.update({ columns: toggled(unusual, column.title) })} />
    ${column.title}</label>`;
  return html`<${Dialog} class="runs" aria-labelledby="runs-title" onClose=${leave}>
    <header>
      <h2 id="runs-title">${which === "run" ? "Runs" : "Compare with..."}</h2>
      <input type="search" ref=${search} value=${filter} aria-label="Filter runs"
        placeholder="name, alert, lr<1e-3, optimizer=adam"
        title="Words, and comparisons with <, >, = or !=, such as lr<1e-3 best_loss<0.5"
        oninput=${({ target }) => page.update({ filter: target.value })} onkeydown=${onkeydown} />
      <span class="count" role="status">${count}${checked.length > 0 && `, ${checked.length} checked`}</span>
      ${checked.length > 0 && page.source.reportUrl &&
      html`<a class="button" download="" href=${page.source.reportUrl(checked)}>Report</a>`}
      ${checked.length > 0 && html`<button onclick=${() => page.update({ checked: new Set() })}>Uncheck all</button>`}
      <details class="menu"><summary>Columns</summary><div class="columns">${columns.map(choice)}</div></details>
      <button onclick=${leave}>Close</button>
    </header>
    <div class="runs-scroll" tabindex="0" role="region" aria-label="Runs">
      <${Table} page=${page} runs=${shown} columns=${visible} order=${order} onSort=${setOrder} onChoose=${choose} />
    </div>
    <${RunCurves} page=${page} runs=${drawn.length ? drawn : shown} isOpen=${drawn.length > 0} />
  <//>`;
}

/** The runs of a report, the best first, with the curves of their losses. */
export function Comparison({ page }) {
  const [order, setOrder] = useState({ by: "Best loss", isReversed: false });
  const { runs, state: { checked } } = page;
  const columns = columnsOf(runs).filter(({ isHidden }) => !isHidden);
  const drawn = runs.filter(({ name }) => checked.has(name));
  const choose = ({ name }) => page.update({ run: name, layer: null, step: null });
  return html`<section class="comparison" aria-label="Comparison">
    <${RunCurves} page=${page} runs=${drawn.length ? drawn : runs} isOpen />
    <${Table} page=${page} runs=${sorted(columns, runs, order)} columns=${columns}
      order=${order} onSort=${setOrder} onChoose=${choose} />
  </section>`;
}

function Table({ page, runs, columns, order, onSort, onChoose }) {
  const head = ({ title, isNumber, note }) => {
    const isSorted = title === order.by;
    const sort = () => onSort({ by: title, isReversed: isSorted && !order.isReversed });
    return html`<th scope="col" title=${note} class=${isNumber ? "number" : ""}
      aria-sort=${isSorted ? (order.isReversed ? "descending" : "ascending") : "none"}>
      <button onclick=${sort}>${title}</button>
    </th>`;
  };
  return html`<table>
    <thead><tr>${[{ title: "Run" }, ...columns].map(head)}</tr></thead>
    <tbody>${runs.map((run) => html`<${Row} key=${run.name} ...${{ page, run, columns, onChoose }} />`)}</tbody>
  </table>`;
}

function Row({ page, run, columns, onChoose }) {
  const { name } = run;
  const { checked, table } = page.state;
  const isChosen = name === page.state[table];
  const isHovered = usePointed((at) => at?.run === name); // perhaps its curve
  return html`<tr class=${isChosen ? "chosen" : isHovered ? "hovered" : ""} onclick=${() => onChoose(run)}
    onpointerenter=${() => point({ run: name })} onpointerleave=${() => point(null)}>
    <td><span class="run-cell">
      <input type="checkbox" aria-label="Draw ${name}" checked=${checked.has(name)}
        onclick=${(event) => event.stopPropagation() /* else the row is chosen */}
        onchange=${() => page.update({ checked: toggled(checked, name) })} />
      <button class="link run-link" aria-current=${isChosen ? "true" : null}>${name}</button>
    </span></td>
    ${columns.map(({ show, isNumber }) => html`<td class=${isNumber ? "number" : ""}>${show(run)}</td>`)}
  </tr>`;
}

/** In the order of a column; runs without a value come last. */
function sorted(columns, runs, { by, isReversed }) {
  const found = columns.find(({ title }) => title === by);
  const key = by === "Run" ? ({ name }) => name : (found?.key ?? (({ started }) => -started));
  const sign = isReversed ? -1 : 1;
  return [...runs].sort((a, b) => {
    const [x, y] = [key(a), key(b)];
    if (isMissing(x) || isMissing(y)) return isMissing(x) - isMissing(y);
    const areNumbers = typeof x === "number" && typeof y === "number";
    return sign * (areNumbers ? x - y : collator.compare(String(x), String(y)));
  });
}

// --- columns: values of each run, and filters

const MOST_METRICS = 4; // shown without being asked for
const TERM = /^([^<>=!]+)(<=|>=|!=|=|<|>)(.*)$/;
const UNITS = [["day", 86400], ["hour", 3600], ["minute", 60]]; // and their seconds
const relativeTime = new Intl.RelativeTimeFormat("en");
const TOLERANCE = 1e-6; // of two numbers that read the same

/**
 * A column has a `title`; `key(run)`, the value to sort and filter by; `show(run)`, the content of a cell. It may
 * be a number, `isNumber`, have a `note`, or be hidden unless the user chooses otherwise.
 * @typedef {Object} Column
 */

const BASE = [
  { title: "Status", key: (run) => run.status, show: statusOf },
  { title: "Started", key: (run) => -run.started /* the newest first */, show: (run) => ago(run.started) },
  number("Last step", (run) => run.lastStep, formatStep),
  number("Last loss", (run) => run.loss && Number(run.loss.last)), // NaN comes as a text
  { ...number("Best loss", (run) => run.loss && Number(run.loss.best)), note: "least mean of a fiftieth of the losses" },
  { title: "Worst alert", key: ({ alert }) => alert?.kind, show: ({ alert }) => (alert ? alertOf(alert) : "none") },
  { ...number("Alerts", (run) => run.alertCount, String), isHidden: true },
  { title: "First difference from the first run", key: (run) => run.difference, show: (run) => run.difference }, // in a report
];

function columnsOf(runs) {
  const metrics = namesIn(runs, "metrics").map((name, _, { length }) => ({
    ...number(name, (run) => run.metrics[name] && Number(run.metrics[name])),
    isHidden: length > MOST_METRICS,
  }));
  const described = runs.filter(({ hparams }) => Object.keys(hparams).length);
  const hparams = namesIn(runs, "hparams").map((name) => {
    const key = (run) => run.hparams[name];
    return {
      title: name,
      key,
      show: (run) => hparamText(key(run)),
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
function matcher(text, columns) {
  const named = (name) => columns.find(({ title }) => nameOf(title) === nameOf(name));
  const tests = text.split(/\s+/).filter(Boolean).map((term) => {
    const [, name, operator, wanted] = TERM.exec(term) ?? [];
    if (name === undefined) return (run) => searched(run).includes(term.toLowerCase());
    const column = named(name);
    return (run) => compare(column?.key(run), operator, wanted);
  });
  return (run) => tests.every((test) => test(run));
}

/** A title or value as a filter has it, without spaces. */
function nameOf(text) {
  return String(text).toLowerCase().replaceAll(" ", "_");
}

function compare(value, operator, wanted) {
  if (isMissing(value)) return operator === "!=";
  if (wanted === "") return true; // still being typed
  const [a, b] = [value, wanted].map(Number);
  const areNumbers = typeof value === "number" && !Number.isNaN(b);
  const isNear = Math.abs(a - b) <= TOLERANCE * Math.max(Math.abs(a), Math.abs(b));
  const order = areNumbers ? (isNear ? 0 : a - b) : collator.compare(nameOf(value), nameOf(wanted));
  if (operator === "!=") return order !== 0;
  if (order === 0) return operator.endsWith("=");
  return operator !== "=" && operator.startsWith("<") === order < 0;
}

function searched(run) {
  const alert = run.alert ? `${run.alert.kind} ${alertText(run.alert)}` : "";
  const hparams = Object.entries(run.hparams).map((pair) => pair.join("="));
  return [run.name, run.status, alert, ...hparams].join(" ").toLowerCase();
}

function isMissing(value) {
  return value == null || value !== value;
}

function namesIn(runs, group) {
  return [...new Set(runs.flatMap((run) => Object.keys(run[group])))];
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

function ago(seconds) {
  const past = Date.now() / 1000 - seconds;
  if (!seconds || !Number.isFinite(past)) return "";
  const [unit, size] = UNITS.find(([, length]) => past >= length) ?? [];
  return unit ? relativeTime.format(-Math.floor(past / size), unit) : "just now";
}

// --- curves of runs: one statistic of a layer, or the loss

const MOST = 20; // distinguishable curves
const AT_ONCE = 20; // runs that are read
const HEIGHT = 190;
const DELAY_MS = 200;
const SEED = /seed/i;

/** @param {Object} props `runs`: rows of the table of runs; `isOpen`: at first */
export function RunCurves({ page, runs, isOpen }) {
  const { theme, source } = page;
  const { layer, smoothing, seeds, curves: subject } = page.state;
  const [toggled, setToggled] = useState(null);
  const slots = useRef(new Map()); // of colors
  const hasChoice = layer !== null;
  const layerTitle = hasChoice ? `${page.statistic.title} of ${layer || "the model"}` : "";
  const isOfLayer = hasChoice && subject !== "loss";
  const of = isOfLayer ? [layer, page.statistic.name] : [null];
  const hasSeeds = runs.some(({ hparams }) => Object.keys(hparams).some((name) => SEED.test(name)));
  const isGrouped = seeds && hasSeeds;
  const most = isGrouped ? Infinity : MOST; // a group is one curve of all its runs
  const read = () => readCurves((run) => curveOf(source, run, ...of).catch(() => null), runs, most);
  const isShown = toggled ?? isOpen;
  const key = isShown ? [...of, most, ...runs.map(({ name }) => name)].join("\n") : "";
  const found = useAnswer(key, null, async () => (isShown ? read() : null), DELAY_MS);
  const lines = (isGrouped ? groupsOf(found ?? []) : (found ?? [])).slice(0, MOST);
  if (found) slots.current = slotsOf(lines.map(({ label }) => label), slots.current);
  const styled = lines.map((curve) => ({ ...curve, ...styleOf(theme, slots.current.get(curve.label)) }));
  const curves = styled.map((curve) => smoothed(curve, smoothing ?? 0));
  const drawn = found ? lines.reduce((sum, { count }) => sum + count, 0) : runs.length;
  const count = drawn < runs.length ? `${drawn} of ${runs.length}` : runs.length;
  const view = { step0: 0, step1: Math.max(1, ...curves.map(({ steps }) => steps.at(-1) + 1)) };
  const options = { curves, theme, view, height: HEIGHT, log: isLog(curves), hasSteps: true };
  const title = `${isOfLayer ? layerTitle : "Loss"} of ${count} run${runs.length === 1 ? "" : "s"}`;
  return html`<details class="below-runs run-curves" open=${isShown} ontoggle=${({ target }) => setToggled(target.open)}>
    <summary>${title}</summary>
    <p class="controls">
      ${hasChoice && html`<${DropDown} label="Curves of" value=${isOfLayer ? "layer" : "loss"}
        options=${[["layer", layerTitle], ["loss", "the loss"]]} onChoose=${(chosen) => page.update({ curves: chosen })} />`}
      <label>Smoothing<input type="range" min="0" max="0.99" step="0.01" value=${smoothing ?? 0}
        oninput=${({ target }) => page.update({ smoothing: Number(target.value) || null })} /></label>
      ${hasSeeds && html`<label><input type="checkbox" checked=${seeds}
        onchange=${({ target }) => page.update({ seeds: target.checked })} />Group by seed (mean, and range as a band)</label>`}
    </p>
    ${found && html`<${Curves} title=${title} labelAt=${({ run }) => run} ...${options} />`}
    ${found && !curves.length && "Not measured in these runs."}
  </details>`;
}

/** A number for each name: the one that it has, or the lowest free one. */
function slotsOf(names, before) {
  const taken = new Set(names.map((name) => before.get(name)));
  const free = [...names.keys()].filter((slot) => !taken.has(slot));
  return new Map(names.map((name) => [name, before.get(name) ?? free.shift()]));
}

/** The curve of a run: the loss, or one of a layer; null or undefined without it. */
async function curveOf(source, run, layer, statistic) {
  if (layer === null) return (await source.scalars(run)).find(({ kind }) => kind === "loss");
  const { layers } = await source.overview(run);
  if (!layers.some(({ name }) => name === layer)) return null;
  return (await source.layer(run, layer)).statistics.get(statistic);
}

/** The curves of the first runs that have one, at most so many; some runs at a time. */
async function readCurves(read, runs, most) {
  const found = [];
  for (let at = 0; at < runs.length && found.length < most; at += AT_ONCE) {
    const some = runs.slice(at, at + AT_ONCE);
    const curves = await Promise.all(some.map(({ name }) => read(name)));
    const named = curves.map((curve, i) => ({ ...curve, run: some[i], label: some[i].name, count: 1 }));
    found.push(...named.filter(({ steps }) => steps?.length));
  }
  return found.slice(0, most);
}

/** Runs that differ in nothing but the seed, each group with its mean and range at every common step. */
function groupsOf(found) {
  const rest = ({ hparams }) => Object.entries(hparams).filter(([name]) => !SEED.test(name));
  const all = found.map(({ run }) => Object.fromEntries(rest(run)));
  const isShared = ([name, value]) => all.every((values) => values[name] === value);
  const groups = Map.groupBy(found, ({ run }) => JSON.stringify(rest(run)));
  return [...groups.values()].map((members) => {
    const [{ run }] = members;
    const { steps, at } = aligned(members);
    const values = at.map((of) => of.reduce((sum, value) => sum + value, 0) / of.length);
    const band = [at.map((of) => Math.min(...of)), at.map((of) => Math.max(...of))];
    const differing = rest(run).filter((pair) => !isShared(pair)).map((pair) => pair.join("="));
    const label = `${differing.join(" ") || run.name} (${members.length} run${members.length === 1 ? "" : "s"})`;
    return { steps, values, band: members.length > 1 ? band : null, label, count: members.length };
  });
}

/** The exponential moving average of a curve, corrected for its start; the curve itself is behind it. */
function smoothed(curve, weight) {
  if (!weight) return curve;
  const average = (values) => {
    let [sum, share] = [0, 0];
    return Array.from(values, (value) => {
      if (!Number.isFinite(value)) return value;
      sum = weight * sum + (1 - weight) * value;
      share = weight * share + 1 - weight;
      return sum / share;
    });
  };
  return { ...curve, values: average(curve.values), band: curve.band?.map(average), raw: curve.band ? null : curve.values };
}
