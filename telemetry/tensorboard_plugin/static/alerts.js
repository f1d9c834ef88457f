// All alerts, newest first, with filters; a click jumps to the cell. And how an alert is put into words.

import { chooseAlert } from "./actions.js";
import { formatStep } from "./format.js";
import { DropDown, LayerName } from "./parts.js";
import { html, useState } from "./preact.js";

const SEVERITIES = [["", "all"], ["error", "errors"], ["warning", "warnings"], ["note", "notes"]];

export function AlertList({ page }) {
  const [kind, setKind] = useState("");
  const [severity, setSeverity] = useState("");
  const chosen = page.chosenAlert;
  const all = page.panels.flatMap(({ alerts, name }) =>
    alerts.map((alert) => ({ alert, run: page.panels.length > 1 ? name : null })),
  );
  const shown = all
    .filter(({ alert }) => (!kind || alert.kind === kind) && (!severity || alert.severity === severity))
    .sort((a, b) => b.alert.step - a.alert.step);
  const kinds = [...new Set(all.map(({ alert }) => alert.kind))].sort().map((name) => [name, kindTitle(name)]);
  const count = shown.length === all.length ? all.length : `${shown.length} of ${all.length}`;
  return html`<section class="alerts" aria-label="Alerts">
    <h2>Alerts<span class="count">${all.length ? count : "none"}</span></h2>
    ${all.length > 0 && html`<div class="filters">
      <${DropDown} label="Kind" options=${[["", "all"], ...kinds]} value=${kind} onChoose=${setKind} />
      <${DropDown} label="Severity" options=${SEVERITIES} value=${severity} onChoose=${setSeverity} />
    </div>`}
    <ul>
      ${shown.map(({ alert, run }) => html`<li>
        <button class="alert ${alert.severity}" aria-pressed=${String(alert === chosen)}
          onclick=${() => chooseAlert(page, alert)}>
          <${AlertText} alert=${alert} run=${run} isShort=${alert === chosen} />
        </button>
      </li>`)}
    </ul>
  </section>`;
}

/** An alert in a few lines, with the run it is of; without its message where that is written elsewhere. */
export function AlertText({ alert, run, isShort = false }) {
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

/** Kind and stage; of an escalated alert, the consequence that escalated it. */
export function alertTitle({ kind, stage, consequences }) {
  const latest = consequences.at(-1);
  const now = stage === "escalated" ? (latest ? `, now: ${faultText(latest)}` : ", escalated") : "";
  return kindTitle(kind) + (stage === "resolved" ? ", resolved" : now);
}

/** A kind of fault and its layer, within a sentence. */
function faultText({ kind, module_name: layer }) {
  const title = kindTitle(kind);
  const name = title.startsWith("NaN") ? title : title.charAt(0).toLowerCase() + title.slice(1);
  return layer ? `${name} in ${layer}` : name;
}

/** A kind of alert as a title. */
export function kindTitle(kind) {
  const text = kind === "nonfinite" ? "NaN or infinity" : kind.replaceAll("_", " ");
  return text.charAt(0).toUpperCase() + text.slice(1);
}

export function alertAloud({ severity, step, kind, module_name: layer }) {
  return `${severity} at step ${formatStep(step)}: ${kindTitle(kind)}${layer ? ` in ${layer}` : ""}.`;
}

/** The layers that an alert names: the culprit, where it was observed, and, until it resolves, the consequences. */
export function layersOf({ module_name: culprit, observed_in: observed, stage, consequences }) {
  return [culprit, observed, ...(stage === "resolved" ? [] : consequences.map((known) => known.module_name))];
}
