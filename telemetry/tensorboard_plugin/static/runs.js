// The dialog that lists all runs: filters, columns, and which runs are drawn together.

import { Parallel, acceptorOf } from "./parallel.js";
import { Dialog, DropDown, useAnswer } from "./parts.js";
import { html, useLayoutEffect, useRef, useState } from "./preact.js";
import { columnsOf, isMissing, matcher, rankCorrelation } from "./run_columns.js";
import { RunCurves, hoveredRun } from "./run_curves.js";

// Names of metrics that are measured on other data than those of training.
const VALIDATION = /(^|[^a-z])(val|valid|validation|eval|dev|test)([^a-z]|$)/i;
const collator = new Intl.Collator("en", { numeric: true });

export function RunTable({ page }) {
  const { table: which, filter, checked: picked, columns: choices } = page.state;
  const [order, setOrder] = useState({ by: "Started", isReversed: false });
  const [wanted, setObjective] = useState(null); // the default: a validation metric, else the best loss
  const [ranges, setRanges] = useState(new Map());
  const [search, scroll] = [useRef(), useRef()];
  useLayoutEffect(() => search.current.focus(), []);
  const answer = useAnswer(page, "", null, () => page.source.runTable());
  const isLoaded = answer !== null && !answer.error;
  const runs = isLoaded ? answer : page.runs;

  const columns = columnsOf(runs);
  const objectives = columns.filter(({ group, title }) => group === "metric" || title.endsWith(" loss"));
  const objective =
    objectives.find(({ title }) => title === wanted) ??
    objectives.find(({ group, title }) => group === "metric" && VALIDATION.test(title)) ??
    objectives.find(({ title }) => title === "Best loss") ??
    objectives[0];
  const offered = which === "run" ? runs : runs.filter(({ name }) => name !== page.state.run);
  const matching = offered.filter(matcher(filter, columns));
  const isFilled = ({ key }) => !matching.length || matching.some((run) => !isMissing(key(run)));
  const isShown = (column) =>
    choices.has(`+${column.title}`) || (!choices.has(`-${column.title}`) && !column.isHidden && isFilled(column));
  const visible = columns.filter(isShown);
  const measures = visible.filter((column) => objectives.includes(column) && column !== objective);
  const axes = [...visible.filter(({ group }) => group === "hparam"), ...measures, ...(objective ? [objective] : [])];
  const within = matching.filter(acceptorOf(axes, matching, ranges));
  const shown = sorted(columns, within, order);
  const drawn = runs.filter(({ name }) => picked.has(name));
  const checked = drawn.map(({ name }) => name);

  const leave = () => page.update({ table: "", filter: "" });
  const choose = ({ name }) => {
    // The table is read when it opens, and may have a run that has begun since.
    if (!page.runs.some((run) => run.name === name)) page.runs = runs;
    const all = which === "run" ? { run: name, layer: null, step: null } : { other: name };
    page.update({ table: "", filter: "", zoom: null, ...all });
  };
  const showColumn = (title, isOn) => {
    const others = [...choices].filter((choice) => choice.slice(1) !== title);
    page.update({ columns: new Set([...others, (isOn ? "+" : "-") + title]) });
  };
  const onkeydown = (event) => {
    if (event.key !== "Enter" || shown.length !== 1) return;
    event.preventDefault(); // else it also presses the button that gets the focus back
    choose(shown[0]);
  };
  const brush = (changed) => {
    scroll.current.style.minHeight = `${scroll.current.getBoundingClientRect().height}px`; // else a shorter table moves the chart
    setRanges(changed);
  };
  const { length } = offered;
  const count = shown.length === length ? `${length} run${length === 1 ? "" : "s"}` : `${shown.length || "none"} of ${length} runs`;
  const choice = (column) => html`<label>
    <input type="checkbox" checked=${isShown(column)} onchange=${({ target }) => showColumn(column.title, target.checked)} />
    ${column.title}</label>`;
  return html`<${Dialog} class="runs" aria-labelledby="runs-title" onClose=${leave} data-loaded=${isLoaded ? "true" : null}>
    <header>
      <h2 id="runs-title">${which === "run" ? "Runs" : "Compare with..."}</h2>
      <input type="search" ref=${search} value=${filter} aria-label="Filter runs"
        placeholder="name, alert, lr<1e-3, optimizer=adam"
        title="Words, and comparisons with <, >, = or !=, such as lr<1e-3 best_loss<0.5"
        oninput=${({ target }) => page.update({ filter: target.value })} onkeydown=${onkeydown} />
      <span class="count" role="status">
        ${answer?.error ? answer.error.message : count + (checked.length ? `, ${checked.length} checked` : "")}
      </span>
      ${checked.length > 0 && page.source.reportUrl &&
      html`<a class="button" download="" href=${page.source.reportUrl(checked)}>Report</a>`}
      ${checked.length > 0 && html`<button onclick=${() => page.update({ checked: new Set() })}>Uncheck all</button>`}
      <details class="menu"><summary>Columns</summary><div class="columns">${columns.map(choice)}</div></details>
      <button onclick=${leave}>Close</button>
    </header>
    <div class="runs-scroll" tabindex="0" role="region" aria-label="Runs" ref=${scroll}>
      <${Table} page=${page} runs=${shown} columns=${visible} order=${order} onSort=${setOrder} onChoose=${choose}>
        ${objective && html`<${Correlations} ...${{ visible, within, objective, objectives }} onChoose=${setObjective} />`}
      <//>
    </div>
    <${RowMark} scroll=${scroll} />
    <${RunCurves} page=${page} runs=${drawn.length ? drawn : shown} isOpen=${drawn.length > 0} />
    ${axes.length > 1 && matching.length > 1 &&
    html`<${Parallel} ...${{ runs: matching, columns: axes, ranges, theme: page.theme }} onBrush=${brush} />`}
  <//>`;
}

/** `children`: further rows of the head. */
function Table({ page, runs, columns, order, onSort, onChoose, children }) {
  const { checked, table } = page.state;
  const current = page.state[table];
  const head = ({ title, isNumber }) => {
    const isSorted = title === order.by;
    const sort = () => onSort({ by: title, isReversed: isSorted && !order.isReversed });
    return html`<th scope="col" class=${isNumber ? "number" : ""}
      aria-sort=${isSorted ? (order.isReversed ? "descending" : "ascending") : "none"}>
      <button onclick=${sort}>${title}</button>
    </th>`;
  };
  const row = (run) => html`<tr key=${run.name} data-name=${run.name} class=${run.name === current ? "chosen" : ""}
    onclick=${() => onChoose(run)} onpointerenter=${() => hoveredRun.set(run.name)} onpointerleave=${() => hoveredRun.set(null)}>
    <td><span class="run-cell">
      <input type="checkbox" aria-label="Draw ${run.name}" checked=${checked.has(run.name)}
        onclick=${(event) => event.stopPropagation() /* else the row is chosen */}
        onchange=${() => page.update({ checked: checked.symmetricDifference(new Set([run.name])) })} />
      <button class="link run-link" aria-current=${run.name === current ? "true" : null}>${run.name}</button>
    </span></td>
    ${columns.map(({ show, isNumber }) => html`<td class=${isNumber ? "number" : ""}>${show(run)}</td>`)}
  </tr>`;
  return html`<table>
    <thead><tr>${[{ title: "Run" }, ...columns].map(head)}</tr>${children}</thead>
    <tbody>${runs.map(row)}</tbody>
  </table>`;
}

/** Marks the row of the run whose curve is under the pointer. */
function RowMark({ scroll }) {
  const name = hoveredRun.use();
  useLayoutEffect(() => {
    for (const row of scroll.current.querySelectorAll("tbody tr")) row.classList.toggle("hovered", row.dataset.name === name);
  });
  return null;
}

/** One number per column: how its ranks go with those of the objective. */
function Correlations({ visible, within, objective, objectives, onChoose }) {
  const values = visible.map((column) =>
    column.isNumber && column.group && column !== objective ? rankCorrelation(within, column, objective) : null,
  );
  if (values.every((value) => value === null)) return null;
  const cell = (value) => {
    const text = value === null ? "" : `${value < 0 ? "−" : "+"}${Math.abs(value).toFixed(2)}`;
    return html`<td class=${Math.abs(value) >= 0.5 ? "number strong" : "number"}>${text}</td>`;
  };
  return html`<tr class="correlations">
    <td><${DropDown} label="Rank correlation with" options=${objectives.map(({ title }) => [title, title])}
      title="Spearman's rank correlation of a column with this one, over the listed runs"
      value=${objective.title} onChoose=${onChoose} /></td>
    ${values.map(cell)}
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
