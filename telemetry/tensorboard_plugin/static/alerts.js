// The side panel: a chosen alert, the layers that changed first, a layer in detail, hyperparameters, all alerts.

import { chooseAlert, close, select } from "./actions.js";
import { Detail } from "./detail.js";
import { alertAloud, alertTitle, formatNumber, formatStep, kindTitle } from "./format.js";
import { DropDown, LayerName, useAnswer } from "./parts.js";
import { html, useState } from "./preact.js";

const SEVERITIES = [["", "all"], ["error", "errors"], ["warning", "warnings"], ["note", "notes"]];

export function Side({ page }) {
  const alert = page.chosenAlert;
  const run = page.panels.length > 1 ? page.current.name : null;
  const step = alert?.step ?? page.state.onsets;
  return html`
    <button class="drawer-close" onclick=${() => close(page)}>Close</button>
    <section class="chosen-alert" aria-label="Chosen alert">
      ${alert && html`<div class="alert ${alert.severity}"><${AlertText} alert=${alert} run=${run} /></div>`}
    </section>
    ${step !== null && html`<${Onsets} page=${page} step=${step} />`}
    ${page.current.indexOf(page.state.layer) >= 0 && html`<${Detail} page=${page} />`}
    <${Hparams} page=${page} />
    <${AlertList} page=${page} />
  `;
}

/** The hyperparameters of the runs, the values in which two differ in bold. */
function Hparams({ page }) {
  const all = page.panels.map(({ overview }) => overview.hparams ?? {});
  const names = [...new Set(all.flatMap(Object.keys))];
  if (!names.length) return null;
  const text = (value) => (typeof value === "number" ? formatNumber(value) : String(value ?? "–"));
  const few = Object.keys(all[0]).map((name) => `${name} ${text(all[0][name])}`).join(" · ");
  const row = (name) => {
    const values = all.map((hparams) => text(hparams[name]));
    const style = new Set(values).size > 1 ? "strong" : "";
    return html`<tr><th scope="row">${name}</th>${values.map((value) => html`<td class=${style}>${value}</td>`)}</tr>`;
  };
  return html`<details class="hparams" open=${!page.source.isLive /* a report may be printed */}>
    <summary title=${few}><b>Hyperparameters</b><span class="muted"> ${few}</span></summary>
    <table><tbody>${names.map(row)}</tbody></table>
  </details>`;
}

const MOST = 8;

/** The layers that changed first around a step. */
function Onsets({ page, step }) {
  const { name: run, round } = page.current;
  const answer = useAnswer(`${run}\n${step}`, round, () => page.source.onsets(run, step));
  if (!answer) return null; // a report knows those at alerts
  const onsets = answer.onsets?.filter(({ name }) => page.current.indexOf(name) >= 0) ?? [];
  const item = ({ name, step: at, factor }) => html`<li>
    <button onclick=${() => select(page, name, at)}>
      <${LayerName} name=${name || "the model"} />
      <span class="number">step ${formatStep(at)} · ${factorText(Number(factor) /* JSON has no infinity */)}</span>
    </button>
  </li>`;
  return html`<section class="onsets" aria-label="Which layers changed first">
    <h2>Which layers changed first
      <span class="count">${onsets.length ? `${answer.count} of ${answer.layers} layers` : ""}</span></h2>
    <p class=${answer.error ? "failure" : "muted"}>${explanation(answer, onsets, formatStep(step))}</p>
    <ol>${onsets.slice(0, MOST).map(item)}</ol>
  </section>`;
}

function explanation({ error, onsets: found }, shown, step) {
  if (error) return error.message;
  if (found === null) return `Too few steps before step ${step} to know the usual range.`;
  if (!shown.length) return `No layer's gradient norm was unusual at step ${step}.`;
  return `Gradient norms out of their usual range by step ${step}, the earliest first.`;
}

function factorText(factor) {
  if (factor === Infinity) return "NaN or infinite";
  if (factor === 0) return "fell to 0";
  return factor >= 1 ? `${formatNumber(factor)}x above` : `${formatNumber(1 / factor)}x below`;
}

/** All alerts, newest first, with filters; a click jumps to the cell. */
function AlertList({ page }) {
  const [kind, setKind] = useState("");
  const [severity, setSeverity] = useState("");
  const chosen = page.chosenAlert;
  const all = page.panels
    .flatMap(({ alerts, name }) => alerts.map((alert) => ({ alert, run: page.panels.length > 1 ? name : null })))
    .sort((a, b) => b.alert.step - a.alert.step);
  const shown = all.filter(({ alert }) => (!kind || alert.kind === kind) && (!severity || alert.severity === severity));
  const kinds = [...new Set(all.map(({ alert }) => alert.kind))].sort().map((name) => [name, kindTitle(name)]);
  const count = shown.length === all.length ? all.length : `${shown.length} of ${all.length}`;
  const item = ({ alert, run }) => html`<li>
    <button class="alert ${alert.severity}" aria-pressed=${String(alert === chosen)} onclick=${() => chooseAlert(page, alert)}>
      <${AlertText} alert=${alert} run=${run} isShort=${alert === chosen} />
    </button>
  </li>`;
  return html`<section class="alerts" aria-label="Alerts">
    <h2>Alerts<span class="count">${all.length ? count : "none"}</span></h2>
    <p class="unseen" role="status">${all.length > 0 && `Latest alert: ${alertAloud(all[0].alert)}`}</p>
    ${all.length > 0 && html`<div class="filters">
      <${DropDown} label="Kind" options=${[["", "all"], ...kinds]} value=${kind} onChoose=${setKind} />
      <${DropDown} label="Severity" options=${SEVERITIES} value=${severity} onChoose=${setSeverity} />
    </div>`}
    <ul>${shown.map(item)}</ul>
  </section>`;
}

/** An alert in a few lines, with the run it is of; without its message where that is written elsewhere. */
function AlertText({ alert, run, isShort = false }) {
  const { severity, step, module_name: culprit, observed_in: observed } = alert;
  return html`
    <span class="alert-head">
      <b>${alertTitle(alert)}<span class="severity">${severity}</span></b>
      <span>step ${formatStep(step)}</span>
    </span>
    ${run && html`<span class="muted">${run}</span>`}
    ${culprit && html`<${LayerName} name=${culprit} />`}
    ${observed && html`<${LayerName} name="observed in ${observed}" />`}
    ${!isShort && html`<span class="alert-message">${alert.message}</span>`}
  `;
}
